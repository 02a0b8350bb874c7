/* Stress test of the C library: random schedules of exchanges, with participants that are late, fail or are killed.

       native_stress rendezvous|passes|sums|killed SEED NUM

   `rendezvous`: threads are the devices of some processes, and exchange statistics of layers, through shared memory too.
   `passes`: threads are the devices of one layer, and run its forward and backward passes on shards of any shape.
   `sums`: threads are processes, whose engines hand over sums and parts of several keys. So a sanitizer sees all of them.
   `killed`: the same in forked processes, of which one is killed. Prints what is wrong and aborts; else returns 0. */
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "external.h"
#include "host.h"
#include "recorder.h"
#include "sync_batch_norm.h"

#define CHECK(condition) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "native_stress: line %d: %s is not so\n", __LINE__, #condition); \
            abort(); \
        } \
    } while (0)

static uint64_t seed;

/* A number that depends on the seed and these alone, so that all participants draw the same. */
static uint64_t drawn(uint64_t a, uint64_t b)
{
    uint64_t x = seed * 0x9e3779b97f4a7c15 + a * 0xbf58476d1ce4e5b9 + b * 0x94d049bb133111eb;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
}

/* Come late, mostly by nothing. */
static void be_late(uint64_t draw)
{
    if (draw % 16 == 0)
        usleep(draw / 16 % 1500);
    else if (draw % 4 == 0)
        sched_yield();
}

static void *shared(size_t bytes)
{
    void *memory = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    return memory;
}

static Recorder *new_recorder(void)
{
    Recorder *recorder = calloc(1, sizeof *recorder);
    recorder->memory = calloc(1, sizeof(RecorderMemory));
    return recorder;
}

/* ---- Rendezvous: LAYERS layers in each of some processes, whose devices are threads ---- */

enum { CHANNELS = 5, ROW = 1 + 2 * CHANNELS, LAYERS = 2, CALLS = 2, MAX_PROCESSES = 3, MAX_DEVICES = 3 };
enum { RIGHT = 4, MISSING, ABANDONS, STRANGER, NUM_KINDS }; /* of steps; right as often as all others */

static int64_t num_processes, num_devices, num_steps;
static Layer layers[MAX_PROCESSES][LAYERS];
static Processes ways[MAX_PROCESSES][LAYERS][2];
static Host hosts[MAX_PROCESSES];
static HostKey keys[MAX_PROCESSES][LAYERS][2];
static char *rows[LAYERS][2][2 * MAX_PROCESSES];
static Line *lines;
static pthread_mutex_t mutexes[MAX_PROCESSES][LAYERS][3];
static pthread_barrier_t step_ends;
static _Atomic int64_t goes_wrong, num_failed;

static int wait_on(State *op, int64_t key, const int8_t *arrived)
{
    int64_t num = 0;
    for (int64_t n = 0; n < num_devices; n++)
        num += arrived[n] != 0;
    CHECK(arrived[op->device] && num > 0 && key >= 0);
    if (goes_wrong)
        gp_close_layer(op->layer);
    return 0;
}

static int refuse(State *op, int64_t key)
{
    (void)key;
    gp_close_layer(op->layer);
    return 0;
}

/* Python's part: what shared memory could not finish in time, or the only way. */
static int allreduce_processes(State *op, int64_t key, double *values, int64_t has_begun)
{
    int64_t size = 2 * CHANNELS + (key % 2 == FORWARD), length = HEADER + size;
    Processes *way = op->layer->processes[key % 2];
    if (!way) {
        for (int64_t n = 0; n < size; n++)
            values[n] *= key % 2 == FORWARD ? 1 : 10;
        return 0;
    }
    CHECK(has_begun);
    double result[HEADER + ROW];
    while (!gp_gather(way->host, way->key, way->key->next_number - 1, 0, (char *)way->rows))
        if (goes_wrong) {
            gp_close_layer(op->layer);
            return 1;
        }
    gp_combine_messages(way->rows, num_processes, length, key % 2, result);
    CHECK(result[0] == (double)num_processes && result[1] == (double)(key / 2));
    memcpy(values, result + HEADER, (size_t)size * sizeof(double));
    return 0;
}

/* Exchange once, and compare; returns whether that succeeded. */
static _Bool meet(State *op, int64_t process, int64_t layer, int64_t key)
{
    int64_t num = num_processes * num_devices, me = process * num_devices + op->device;
    double value = (double)(1 + me + 10 * key + 100 * layer);
    op->layer = &layers[process][layer];
    for (int64_t n = 0; n < ROW; n++)
        op->message[n] = value;
    if (key % 2 == FORWARD) {
        op->message[0] = 1;
        memset(op->message + 1 + CHANNELS, 0, CHANNELS * sizeof(double));
    }
    if (!gp_allreduce(op, key))
        return 0;
    double mean = (double)(num - 1) / 2 + (double)(1 + 10 * key + 100 * layer);
    double factor = layer == 1 && num_processes == 1 ? 10 : 1; /* what Python exchanges */
    for (int64_t c = 0; c < CHANNELS; c++)
        if (key % 2 == FORWARD)
            CHECK(op->message[0] == (double)num && fabs(op->message[1 + c] - mean) < 1e-9);
        else
            CHECK(fabs(op->message[c] - factor * mean * (double)num) < 1e-9);
    return 1;
}

/* One step of one device; it fails on all devices, or on none that has left it before. */
static void take_step(State *op, int64_t process, int64_t step)
{
    uint64_t kind = drawn(step, 1) % NUM_KINDS, culprit = drawn(step, 2) % (uint64_t)(num_processes * num_devices);
    uint64_t moment = drawn(step, 3) % (2 * CALLS * LAYERS), now = 0, me = (uint64_t)(process * num_devices + op->device);
    for (int64_t key = 0; key < 2 * CALLS; key++)
        for (int64_t layer = 0; layer < LAYERS; layer++, now++) {
            if (kind > RIGHT && me == culprit && now == moment) {
                be_late(drawn(step, 4));
                goes_wrong = 1;
                if (kind == STRANGER) {
                    op->layer = &layers[process][layer];
                    op->device = -1;
                    CHECK(!gp_allreduce(op, key));
                    op->device = (int64_t)me % num_devices;
                } else if (kind == ABANDONS) {
                    gp_close_layer(&layers[process][layer]);
                }
                return;
            }
            be_late(drawn(step * 64 + now, 5 + me));
            int64_t times = drawn(step * 64 + now, 77) % 8 == 0 ? 2 : 1; /* as two backward passes of one forward pass */
            while (times--)
                if (!meet(op, process, layer, key)) {
                    CHECK(goes_wrong);
                    num_failed++;
                    return;
                }
        }
}

static void open_layers(void)
{
    memset(lines, 0, LAYERS * 2 * MAX_PROCESSES * sizeof(Line));
    for (int64_t process = 0; process < num_processes; process++)
        for (int64_t layer = 0; layer < LAYERS; layer++) {
            for (int64_t n = 0; n < num_devices; n++)
                CHECK(gp_waits_at(&layers[process][layer], n) < 0);
            gp_open_layer(&layers[process][layer], 1);
            keys[process][layer][0].next_number = keys[process][layer][1].next_number = 1;
        }
    goes_wrong = 0;
}

static void *run_device(void *argument)
{
    int64_t me = (int64_t)argument, process = me / num_devices;
    double message[ROW];
    State op = {.device = me % num_devices, .channels = CHANNELS, .message = message};
    for (int64_t step = 0; step < num_steps; step++) {
        take_step(&op, process, step);
        if (pthread_barrier_wait(&step_ends) == PTHREAD_BARRIER_SERIAL_THREAD)
            open_layers();
        pthread_barrier_wait(&step_ends);
    }
    return 0;
}

static void run_rendezvous(void)
{
    static const int8_t takes_part[MAX_DEVICES] = {1, 1, 1};
    Line *of_hosts = shared(MAX_PROCESSES * sizeof(Line));
    lines = shared(LAYERS * 2 * MAX_PROCESSES * sizeof(Line));
    num_processes = 1 + (int64_t)(drawn(1, 1) % MAX_PROCESSES), num_devices = 1 + (int64_t)(drawn(1, 2) % MAX_DEVICES);
    for (int64_t process = 0; process < num_processes; process++) {
        Recorder *recorder = new_recorder();
        hosts[process] = (Host){.size = num_processes, .rank = process, .lines = of_hosts, .recorder = recorder, .num_hosts = 1};
        hosts[process].patience = 200000;
        for (int64_t n = 0; n < LAYERS; n++) {
            for (int64_t m = 0; m < 3; m++)
                gp_make_mutex(&mutexes[process][n][m]);
            Layer *layer = &layers[process][n];
            *layer = (Layer){.mutex = &mutexes[process][n][2], .is_open = 1, .num_devices = num_devices, .recorder = recorder,
                             .takes_part = takes_part, .num_taking_part = num_devices, .channels = CHANNELS};
            layer->patience = 500000, layer->spans_processes = num_processes > 1 || n == 1;
            for (int64_t direction = 0; num_processes > 1 && direction < 2; direction++) {
                int64_t length = HEADER + 2 * CHANNELS + (direction == FORWARD);
                HostKey *key = &keys[process][n][direction];
                for (int64_t row = 0; process == 0 && row < 2 * num_processes; row++)
                    rows[n][direction][row] = shared((size_t)length * sizeof(double));
                *key = (HostKey){.lines = lines + (2 * n + direction) * MAX_PROCESSES, .depth = 2, .next_number = 1,
                                 .num_values = length * (int64_t)sizeof(double), .rows = rows[n][direction]};
                Processes *way = layer->processes[direction] = &ways[process][n][direction];
                *way = (Processes){&mutexes[process][n][direction], &hosts[process], key, num_processes,
                                   calloc((size_t)length, sizeof(double)),
                                   calloc((size_t)(num_processes * length), sizeof(double))};
            }
        }
    }
    pthread_t threads[MAX_PROCESSES * MAX_DEVICES];
    int64_t num = num_processes * num_devices;
    pthread_barrier_init(&step_ends, 0, (unsigned)num);
    for (int64_t n = 0; n < num; n++)
        pthread_create(&threads[n], 0, run_device, (void *)n);
    for (int64_t n = 0; n < num; n++)
        pthread_join(threads[n], 0);
    printf("%lld processes of %lld devices, %lld passes failed\n", (long long)num_processes, (long long)num_devices,
           (long long)num_failed);
}

/* ---- Passes: the devices of one layer, with arrays that are as long as they must be ---- */

static int64_t outer_of(int64_t step, int64_t device)
{
    return (int64_t)(drawn(step, 400 + device) % 5);
}

static double number_at(const State *op, const void *array, int64_t i)
{
    return op->is_double ? ((const double *)array)[i] : (double)((const float *)array)[i];
}

static void set_number(const State *op, void *array, int64_t i, double value)
{
    if (op->is_double)
        ((double *)array)[i] = value;
    else
        ((float *)array)[i] = (float)value;
}

static void *new_numbers(const State *op, int64_t num, double value)
{
    void *array = malloc((size_t)num * (op->is_double ? sizeof(double) : sizeof(float)) + !num);
    for (int64_t i = 0; i < num; i++)
        set_number(op, array, i, value);
    return array;
}

/* Of a sample's value in a channel; the second is for the gradient of the output. */
static double sample(int64_t device, int64_t n, int64_t c, int64_t i, int64_t which)
{
    return (double)((device * 31 + n * 17 + c * 5 + i * 3 + which * 11) % 23) + (double)(which ? 0 : 100 * c);
}

/* What a step's batch comes to in a channel: count, mean, variance; sum of dy, sum of dy * (x - mean). */
static void whole_batch(int64_t step, int64_t inner, int64_t c, double result[5])
{
    memset(result, 0, 5 * sizeof(double));
    for (int64_t pass = 0; pass < 3; pass++) {
        for (int64_t device = 0; device < num_devices; device++)
            for (int64_t n = 0; n < outer_of(step, device); n++)
                for (int64_t i = 0; i < inner; i++) {
                    double x = sample(device, n, c, i, 0), dy = sample(device, n, c, i, 1);
                    if (pass == 0)
                        result[0]++, result[3] += dy;
                    else if (pass == 1)
                        result[1] += x / result[0];
                    else
                        result[2] += (x - result[1]) * (x - result[1]) / result[0], result[4] += dy * (x - result[1]);
                }
    }
}

static void *run_layer(void *argument)
{
    int64_t device = (int64_t)argument, channels = layers[0][0].channels;
    Counter calls = {0};
    for (int64_t step = 0; step < num_steps; step++) {
        int64_t inner = drawn(step, 500) % 2 ? 1 : 1 + (int64_t)(drawn(step, 501) % 300), outer = outer_of(step, device);
        int64_t num = outer * channels * inner;
        double *vectors = malloc((size_t)(3 * channels) * sizeof(double));
        State op = {.layer = &layers[0][0], .device = device, .calls = &calls, .is_double = drawn(step, 502) % 2,
                    .outer = outer, .channels = channels, .inner = inner, .momentum = 0.9, .epsilon = 1e-3};
        op.mean = vectors, op.variance = vectors + channels, op.rstd = vectors + 2 * channels;
        op.message = malloc((size_t)(1 + 2 * channels) * sizeof(double));
        op.scratch = malloc((size_t)(5 * channels) * sizeof(double));
        op.arithmetic = gp_arithmetic_in_memory(op.is_double, -1);
        void *x = new_numbers(&op, num, 0), *dy = new_numbers(&op, num, 0), *y = new_numbers(&op, num, NAN);
        void *dx = new_numbers(&op, num, 1), *gamma = new_numbers(&op, channels, 2), *beta = new_numbers(&op, channels, 3);
        void *dgamma = new_numbers(&op, channels, NAN), *dbeta = new_numbers(&op, channels, NAN);
        void *mean = new_numbers(&op, channels, 0), *variance = new_numbers(&op, channels, 0);
        for (int64_t n = 0, at = 0; n < outer; n++)
            for (int64_t c = 0; c < channels; c++)
                for (int64_t i = 0; i < inner; i++, at++) {
                    set_number(&op, x, at, sample(device, n, c, i, 0));
                    set_number(&op, dy, at, sample(device, n, c, i, 1));
                }
        be_late(drawn(step, 600 + device));
        void *forward[] = {x, gamma, beta, y, mean, variance};
        void *backward[] = {dy, x, gamma, 0, 0, dx, dgamma, dbeta, mean, variance};
        int write[] = {1, 1, 1}, add[] = {3, 1, 1};
        CHECK(gp_forward(6, forward, 0, write, 1, &op) == 1 && op.valid);
        be_late(drawn(step, 700 + device));
        CHECK(gp_backward(10, backward, 0, add, 1, &op) == 1 && !op.failed);
        for (int64_t c = 0; c < channels; c++) {
            double batch[5];
            whole_batch(step, inner, c, batch);
            double rstd = 1 / sqrt(batch[2] + 1e-3), close = op.is_double ? 1e-9 : 2e-3;
            CHECK(fabs(number_at(&op, mean, c) - 0.1 * batch[1]) < close && op.count == batch[0]);
            for (int64_t n = 0; n < outer; n++)
                for (int64_t i = 0; i < inner; i++) {
                    int64_t at = (n * channels + c) * inner + i;
                    double normal = (sample(device, n, c, i, 0) - batch[1]) * rstd, head = sample(device, n, c, i, 1);
                    CHECK(fabs(number_at(&op, y, at) - (2 * normal + 3)) < close);
                    double slope = head - batch[3] / batch[0] - normal * rstd * batch[4] / batch[0];
                    CHECK(fabs(number_at(&op, dx, at) - (1 + 2 * rstd * slope)) < 30 * close);
                }
        }
        void *all[] = {vectors, op.message, op.scratch, x, dy, y, dx, gamma, beta, dgamma, dbeta, mean, variance};
        for (size_t n = 0; n < sizeof all / sizeof *all; n++)
            free(all[n]);
    }
    return 0;
}

static void run_passes(void)
{
    static const int8_t takes_part[MAX_DEVICES] = {1, 1, 1};
    pthread_t threads[MAX_DEVICES];
    num_devices = 1 + (int64_t)(drawn(1, 2) % MAX_DEVICES);
    gp_make_mutex(&mutexes[0][0][0]);
    layers[0][0] = (Layer){.mutex = &mutexes[0][0][0], .is_open = 1, .num_devices = num_devices, .recorder = new_recorder(),
                           .takes_part = takes_part, .num_taking_part = num_devices, .patience = 500000,
                           .channels = 1 + (int64_t)(drawn(1, 7) % 20),
                           .passes = calloc(NUM_PASSES, sizeof(PassTimes))};
    for (int64_t n = 0; n < num_devices; n++)
        pthread_create(&threads[n], 0, run_layer, (void *)n);
    for (int64_t n = 0; n < num_devices; n++)
        pthread_join(threads[n], 0);
    CHECK(layers[0][0].num_passes == 2 * num_steps * num_devices);
    gp_open_layer(&layers[0][0], 0);
}

/* ---- Sums: each process has a driver's thread, and one that is its engine ---- */

enum { KEYS = 4, SLOTS = 2, DEVICES = 2, SIZE = 20000 };
enum { SUM, SUM_OF_PARTS, GATHER_OF_PARTS }; /* what is done at a key */

typedef struct Array { /* as DLPack describes it */
    char *data;
    int64_t rest[4];
    uint64_t byte_offset;
} Array;

typedef struct Slot { /* one exchange at a time of a key, of two that may be queued */
    HostExchange exchange;
    Segment segment;
    Array arrays[DEVICES];
    void *handles[2 * DEVICES];
    char *addresses[2 * DEVICES];
    _Atomic int64_t ended; /* 1, or 2 after an error */
} Slot;

typedef struct Process {
    Host host;
    HostKey keys[KEYS];
    char *rows[KEYS][2 * MAX_PROCESSES];
    int64_t bounds[MAX_PROCESSES + 1];
    Slot slots[KEYS][SLOTS];
    HostExchange *table[KEYS * SLOTS];
    _Atomic int64_t summed[KEYS]; /* the number of a sum over the hosts that MPI is to do */
    pthread_mutex_t errors;
} Process;

static Process *processes;
static _Atomic int64_t *lost; /* in shared memory: 1 + rank of the process that does not come any more */
static int64_t stops_at, stopper;

static int start_between_hosts(int64_t number, int64_t call)
{
    processes[number / KEYS].summed[number % KEYS] = call;
    return 0;
}

static int address_of_array(void *array, void *result)
{
    *(void **)result = array;
    return 0;
}

static int nothing(void *array)
{
    (void)array;
    return 0;
}

static void end_slot(void *engine, void *slot, void *error)
{
    (void)engine;
    ((Slot *)slot)->ended = error ? 2 : 1;
}

static int64_t dtype_of(int64_t key)
{
    return key % 3;
}

static double value_of(int64_t rank, int64_t key, int64_t number, int64_t device, int64_t i)
{
    return (double)((i + number) % 97 + 100 * rank + 1000 * device + 7 * key);
}

static void put(Array *array, int64_t key, int64_t i, double value)
{
    if (dtype_of(key) == 0)
        ((float *)array->data)[i] = (float)value;
    else if (dtype_of(key) == 1)
        ((double *)array->data)[i] = value;
    else
        ((int32_t *)array->data)[i] = (int32_t)value;
}

static double at(const Array *array, int64_t key, int64_t i)
{
    return dtype_of(key) == 0   ? (double)((float *)array->data)[i]
           : dtype_of(key) == 1 ? ((double *)array->data)[i]
                                : (double)((int32_t *)array->data)[i];
}

static int64_t kind_of(const Process *process, int64_t key)
{
    return process->host.num_hosts > 1 ? SUM : key % 3;
}

static void begin(Process *process, int64_t key, int64_t number)
{
    Slot *slot = &process->slots[key][number % SLOTS];
    for (int64_t device = 0; device < DEVICES; device++)
        for (int64_t i = 0; i < SIZE; i++)
            put(&slot->arrays[device], key, i, value_of(process->host.rank, key, number, device, i));
    slot->ended = 0;
    slot->exchange.number = number;
    slot->exchange.state = PUSHED;
    gp_begin_exchange(0, &(OnComplete){end_slot, 0, slot}, &slot->exchange);
}

/* What the arrays hold after an exchange. */
static void compare(Process *process, int64_t key, int64_t number)
{
    Slot *slot = &process->slots[key][number % SLOTS];
    int64_t rank = process->host.rank, kind = kind_of(process, key), *bounds = process->bounds;
    if (slot->ended == 2) {
        CHECK(*lost);
        for (int64_t i = 0; kind == SUM && i < SIZE; i += 7)
            CHECK(dtype_of(key) == 2 ? at(&slot->arrays[1], key, i) == 0 : isnan(at(&slot->arrays[1], key, i)));
        return;
    }
    for (int64_t device = 0; device < DEVICES; device++)
        for (int64_t i = 0, owner = 0; i < SIZE; i += 13) {
            double wanted = 0, found = at(&slot->arrays[device], key, i);
            while (i >= bounds[owner + 1])
                owner++;
            for (int64_t from = 0; from < num_processes; from++)
                for (int64_t one = 0; one < DEVICES; one++)
                    wanted += value_of(from, key, number, one, i);
            if (kind == GATHER_OF_PARTS)
                wanted = value_of(owner, key, number, 0, i);
            if (kind != SUM_OF_PARTS || owner == rank)
CHECK(found == (double)process->host.num_hosts * wanted);
        }
}

/* Whether it has ended; if a process is lost, this one's exchanges end with an error. */
static void wait_for_end(Process *process, int64_t key, int64_t number)
{
    while (!process->slots[key][number % SLOTS].ended) {
        if (*lost && !process->host.failed) {
            process->host.failed = process;
            gp_look(&process->host);
        }
        usleep(50);
    }
    compare(process, key, number);
}

static void *run_engine(void *argument)
{
    Process *process = argument;
    int64_t rank = process->host.rank;
    for (int64_t step = 1; step <= num_steps; step++) {
        for (int64_t n = 0; n < KEYS; n++) {
            int64_t key = (n + (int64_t)drawn(step, 100 + rank)) % KEYS; /* in another order on each process */
            if (key < 0)
                key += KEYS;
            if (rank == stopper && step * KEYS + n == stops_at) {
                *lost = 1 + rank;
                goto end;
            }
            be_late(drawn(step * KEYS + n, 200 + rank));
            int64_t first = 2 * step - 1, swapped = (int64_t)(drawn(step * KEYS + key, 300 + rank) % 2);
            for (int64_t times = 0; times < SLOTS; times++) /* two of one key, queued in either order */
                begin(process, key, first + (times ^ swapped));
        }
        for (int64_t key = 0; key < KEYS; key++)
            for (int64_t times = 0; times < SLOTS; times++)
                wait_for_end(process, key, 2 * step - 1 + times);
        if (process->host.failed)
            break;
    }
end:
    while (rank == stopper && *lost == 1 + rank) { /* what it began ends with an error too */
        process->host.failed = process;
        gp_look(&process->host);
        _Bool idle = 1;
        for (int64_t n = 0; n < KEYS * SLOTS; n++)
            idle = idle && process->table[n]->state == IDLE;
        if (idle)
            break;
    }
    process->host.stopped = 1;
    gp_wake(&process->host);
    return 0;
}

static void *run_driver(void *host)
{
    gp_drive(host);
    return 0;
}

/* MPI, which sums over two hosts that bring the same. */
static void *run_mpi(void *argument)
{
    Process *process = argument;
    while (!process->host.stopped) {
        for (int64_t n = 0; n < KEYS; n++) {
            int64_t number = atomic_exchange(&process->summed[n], 0);
            HostKey *key = &process->keys[n];
            if (!number)
                continue;
            Array row = {.data = key->rows[0]}, result = {.data = process->slots[n][0].segment.result};
            for (int64_t i = 0; i < SIZE; i++)
                put(&result, n, i, 2 * at(&row, n, i));
            gp_summed(&process->host, &key, &number, 1);
        }
        usleep(20);
    }
    return 0;
}

static void make_processes(int64_t num_hosts)
{
    size_t bytes = SIZE * sizeof(double);
    Line *of_hosts = shared(MAX_PROCESSES * sizeof(Line)), *of_keys = shared(KEYS * MAX_PROCESSES * sizeof(Line));
    lost = shared(sizeof *lost);
    processes = calloc((size_t)num_processes, sizeof *processes);
    for (int64_t rank = 0; rank < num_processes; rank++) {
        Process *process = &processes[rank];
        gp_make_mutex(&process->errors);
        process->host = (Host){.size = num_processes, .rank = rank, .lines = of_hosts, .errors = &process->errors,
                               .recorder = new_recorder(), .num_hosts = num_hosts, .patience = 1000000};
        for (int64_t n = 0; n <= num_processes; n++)
            process->bounds[n] = n == num_processes ? SIZE : n * (SIZE / num_processes) + (n ? 5 : 0);
        for (int64_t n = 0; n < KEYS; n++) {
            HostKey *key = &process->keys[n];
            *key = (HostKey){.lines = of_keys + n * MAX_PROCESSES, .num_values = SIZE, .dtype = dtype_of(n), .next_number = 1,
                             .depth = num_hosts > 1 ? 1 : 1 + n % 2, .number = rank * KEYS + n, .rows = process->rows[n]};
            for (int64_t row = 0; row < 2 * num_processes; row++)
                process->rows[n][row] = rank == 0 ? shared(bytes) : processes[0].rows[n][row];
            char *result = rank == 0 ? shared(bytes) : processes[0].slots[n][0].segment.result;
            for (int64_t m = 0; m < SLOTS; m++) {
                Slot *slot = &process->slots[n][m];
                int64_t kind = kind_of(process, n), num_read = kind == GATHER_OF_PARTS ? 1 : DEVICES;
                slot->segment = (Segment){SIZE, 0, result, kind == SUM ? 0 : process->bounds};
                for (int64_t device = 0; device < DEVICES; device++) {
                    CHECK(!posix_memalign((void **)&slot->arrays[device].data, 1 << 12, bytes));
                    slot->handles[num_read + device] = &slot->arrays[device];
                    if (device < num_read)
                        slot->handles[device] = &slot->arrays[device];
                }
                slot->exchange = (HostExchange){.host = &process->host, .key = key, .num_read = num_read, .gathers = kind == 2,
                                                .num_written = DEVICES, .num_segments = 1, .segments = &slot->segment,
                                                .releases = kind == 1, .handles = slot->handles,
                                                .arrays = slot->addresses};
                process->table[SLOTS * n + m] = &slot->exchange;
            }
        }
        process->host.exchanges = process->table;
        process->host.num_exchanges = KEYS * SLOTS;
    }
}

static void run_process(Process *process, pthread_t threads[3])
{
    pthread_create(&threads[0], 0, run_engine, process);
    pthread_create(&threads[1], 0, run_driver, &process->host);
    pthread_create(&threads[2], 0, run_mpi, process);
}

static void run_sums(int64_t num_hosts, _Bool one_stops)
{
    pthread_t threads[MAX_PROCESSES][3];
    make_processes(num_hosts);
    stopper = one_stops ? (int64_t)(drawn(2, 3) % (uint64_t)num_processes) : -1;
    stops_at = (int64_t)(drawn(2, 4) % (uint64_t)(KEYS * num_steps)) + KEYS;
    for (int64_t rank = 0; rank < num_processes; rank++)
        run_process(&processes[rank], threads[rank]);
    for (int64_t rank = 0; rank < num_processes; rank++)
        for (int64_t n = 0; n < 3; n++)
            pthread_join(threads[rank][n], 0);
}

/* The parent sees that a process was killed, and says so to the others, as the progress engine does. */
static void run_killed(void)
{
    pid_t children[MAX_PROCESSES];
    make_processes(1);
    stopper = -1;
    for (int64_t rank = 0; rank < num_processes; rank++)
        if (!(children[rank] = fork())) {
            pthread_t threads[3];
            run_process(&processes[rank], threads);
            for (int64_t n = 0; n < 3; n++)
                pthread_join(threads[n], 0);
            _exit(0);
        }
    usleep((unsigned)(drawn(3, 1) % 60000));
    int64_t victim = (int64_t)(drawn(3, 2) % (uint64_t)num_processes);
    kill(children[victim], SIGKILL);
    for (int64_t n = 0, status; n < num_processes; n++) {
        int64_t rank = (victim + n) % num_processes;
        CHECK(waitpid(children[rank], (int *)&status, 0) == children[rank]);
        CHECK((int)status == 0 || (rank == victim && WTERMSIG((int)status) == SIGKILL));
        if (rank == victim)
            *lost = 1 + rank;
    }
}

int main(int num, char **arguments)
{
    CHECK(num == 4);
    seed = strtoull(arguments[2], 0, 10), num_steps = strtoll(arguments[3], 0, 10);
    gp_external = (External){.wait_on = wait_on, .refuse = refuse, .allreduce_processes = allreduce_processes,
                             .start_between_hosts = start_between_hosts, .MXNDArrayToDLPack = address_of_array,
                             .MXNDArrayGetData = address_of_array,
                             .MXNDArrayFree = nothing, .MXNDArrayCallDLPackDeleter = nothing};
    num_processes = 2 + (int64_t)(drawn(1, 3) % (MAX_PROCESSES - 1));
    if (!strcmp(arguments[1], "rendezvous"))
        run_rendezvous();
    else if (!strcmp(arguments[1], "passes"))
        run_passes();
    else if (!strcmp(arguments[1], "sums"))
        run_sums(1 + (int64_t)(drawn(1, 4) % 2), drawn(1, 5) % 2);
    else
        run_killed();
    return 0;
}
