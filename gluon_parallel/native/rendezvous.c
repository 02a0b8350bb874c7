/* Rendezvous of one layer's devices: they exchange statistics, call after call, also with the other processes.

   Each device copies its row into the meeting of the call; the last one combines the rows in the devices' order, exchanges
   the result with the other processes, through shared memory where the store can, and wakes the others. A device that
   waits asks Python now and then, which knows limits and names: it goes on waiting, or closes the layer, which fails all
   exchanges that are not complete, and all later ones, until Python opens the layer again. */
#include "sync_batch_norm.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* The sum of squares is never formed: at a mean of 1e6 and a variance of 1, the variance would be the 40th of float64's
   53 bits. The mean is computed from offsets from one row's mean, so rows with equal means give exactly this mean. */
static void combine_moments(const double *rows, int64_t num, int64_t stride, int64_t size, double *result)
{
    int64_t channels = (size - 1) / 2;
    const double *origin = 0;
    double count = 0, *mean = result + 1, *m2 = mean + channels;
    for (int64_t n = 0; n < num; n++) {
        const double *row = rows + n * stride;
        count += row[0];
        if (!origin && row[0] > 0)
            origin = row + 1;
    }
    memset(result, 0, (size_t)size * sizeof(double));
    if (!origin)
        return;
    result[0] = count;
    for (int64_t n = 0; n < num; n++) {
        const double *row = rows + n * stride;
        for (int64_t c = 0; c < channels; c++)
            mean[c] += row[0] * (row[1 + c] - origin[c]);
    }
    for (int64_t c = 0; c < channels; c++)
        mean[c] = origin[c] + mean[c] / count;
    for (int64_t n = 0; n < num; n++) {
        const double *row = rows + n * stride;
        if (row[0] <= 0)
            continue;
        for (int64_t c = 0; c < channels; c++) {
            double d = row[1 + c] - mean[c];
            m2[c] += row[1 + channels + c] + row[0] * (d * d);
        }
    }
}

/* Combine `num` rows of `size` numbers, `stride` numbers apart, into `result`, which is none of them.

   FORWARD: a row is (1 + 2C,) moments: the count, C means, C sums of squared deviations from the mean; a row of count 0
   holds finite numbers. BACKWARD: a row is (2C,) sums. */
static void combine(const double *rows, int64_t num, int64_t stride, int64_t size, int64_t direction, double *result)
{
    if (direction == FORWARD) {
        combine_moments(rows, num, stride, size, result);
        return;
    }
    memset(result, 0, (size_t)size * sizeof(double));
    for (int64_t n = 0; n < num; n++)
        for (int64_t i = 0; i < size; i++)
            result[i] += rows[n * stride + i];
}

/* Python calls it: rows (num, size), result (size,). */
EXPORT void gp_combine_statistics(const double *rows, int64_t num, int64_t size, int64_t direction, double *result)
{
    combine(rows, num, size, size, direction, result);
}

EXPORT void gp_combine_messages(const double *rows, int64_t num, int64_t size, int64_t direction, double *result)
{
    combine(rows + HEADER, num, size, size - HEADER, direction, result + HEADER);
    result[0] = 0;
    result[1] = rows[1];
    for (int64_t n = 0; n < num; n++) {
        result[0] += rows[n * size];
        if (rows[n * size + 1] != result[1])
            result[1] = NAN;
    }
}

enum { FREE, GATHERING, COMPLETE, REDUCED, FAILED };

/* The exchange of one direction of one call. */
typedef struct Meeting {
    struct Meeting *next;
    int64_t key; /* 2 * call + direction */
    int64_t state;
    int64_t num_arrived;
    int64_t num_left;
    int64_t complete_at;
    int64_t record; /* its number in the flight recorder; 0 where it has none */
    pthread_cond_t changed;
    int64_t num_devices, channels; /* for which it has memory */
    double *rows;                  /* (1 + num_devices, 1 + 2C): the result, and a row for each device */
    int8_t *arrived;               /* (num_devices,): which devices have brought their row */
} Meeting;

/* How many numbers a row has: a count, and two numbers per channel; without the count on the way back. */
static int64_t length_of(const Layer *layer, int64_t key)
{
    return 2 * layer->channels + (key % 2 == FORWARD);
}

static void *memory_of(size_t bytes)
{
    void *memory = calloc(1, bytes);
    if (!memory)
        abort(); /* for some kilobytes */
    return memory;
}

static Meeting *new_meeting(Layer *layer)
{
    Meeting *meeting = memory_of(sizeof *meeting);
    size_t num_devices = (size_t)layer->num_devices, row = 1 + 2 * (size_t)layer->channels;
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&meeting->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    meeting->num_devices = layer->num_devices;
    meeting->channels = layer->channels;
    meeting->rows = memory_of((1 + num_devices) * row * sizeof(double));
    meeting->arrived = memory_of(num_devices);
    meeting->next = layer->meetings;
    layer->meetings = meeting;
    return meeting;
}

/* The meeting of `key` that gathers, or a free one that becomes it. A key may come again, as by two backward passes of one
   forward pass, before the last device has left. */
static Meeting *find(Layer *layer, int64_t key)
{
    Meeting *found = 0;
    for (Meeting *meeting = layer->meetings; meeting; meeting = meeting->next) {
        if (meeting->state == GATHERING && meeting->key == key)
            return meeting;
        if (meeting->state == FREE && meeting->num_devices == layer->num_devices && meeting->channels == layer->channels)
            found = meeting;
    }
    if (!found)
        found = new_meeting(layer);
    found->state = GATHERING;
    found->key = key;
    found->num_arrived = found->num_left = found->record = 0;
    memset(found->rows, 0, (size_t)(1 + layer->num_devices) * (1 + 2 * (size_t)layer->channels) * sizeof(double));
    memset(found->arrived, 0, (size_t)layer->num_devices); /* rows of devices that take no part stay zero */
    if (layer->num_taking_part > 1)
        found->record = gp_recorder_begin(layer->recorder, layer->names[key % 2], key / 2 + 1, 8 * length_of(layer, key));
    return found;
}

static void end(Layer *layer, Meeting *meeting, int64_t state)
{
    meeting->state = state;
    if (meeting->record)
        gp_recorder_end(layer->recorder, meeting->record, state == REDUCED ? 0 : GAVE_UP);
    pthread_cond_broadcast(&meeting->changed);
}

/* Whether the values have become those of all processes of this host; if not, Python finishes what has begun. */
static _Bool through_shared_memory(Processes *processes, int64_t call, int64_t direction, double *values, int64_t size)
{
    int64_t number = processes->key->next_number, length = HEADER + size, num = processes->num_processes;
    const double *rows = processes->rows;
    processes->row[0] = 1;
    processes->row[1] = (double)call;
    memcpy(processes->row + HEADER, values, (size_t)size * sizeof(double));
    processes->key->next_number = number + 1;
    if (!gp_gather(processes->host, processes->key, number, processes->row, (char *)processes->rows))
        return 0; /* the others are late */
    for (int64_t n = 0; n < num; n++)
        if (rows[n * length] != 1 || rows[n * length + 1] != (double)call)
            return 0; /* Python says who is out of step */
    combine(rows + HEADER, num, length, size, direction, values);
    return 1;
}

/* Whether `values` have become those of all processes; if not, Python has closed the layer. Python makes the first exchange,
   and sets `processes` then if the store has shared memory for all. */
static _Bool allreduce_processes(State *op, int64_t key, double *values)
{
    Layer *layer = op->layer;
    int64_t call = key / 2, direction = key % 2;
    Processes *processes = layer->processes[direction];
    if (!processes)
        return !gp_external.allreduce_processes(op, key, values, 0);
    pthread_mutex_lock(processes->mutex);
    _Bool done = through_shared_memory(processes, layer->earlier_calls + call, direction, values, length_of(layer, key))
                 || !gp_external.allreduce_processes(op, key, values, 1);
    pthread_mutex_unlock(processes->mutex);
    return done;
}

/* All have come: combine their rows, exchange the result with the other processes, and wake the others. */
static void complete_meeting(Layer *layer, Meeting *meeting, State *op)
{
    int64_t length = length_of(layer, meeting->key), stride = 1 + 2 * layer->channels;
    meeting->state = COMPLETE;
    meeting->complete_at = now(CLOCK_MONOTONIC);
    combine(meeting->rows + stride, layer->num_devices, stride, length, meeting->key % 2, meeting->rows);
    _Bool done = 1;
    if (layer->spans_processes) {
        pthread_mutex_unlock(layer->mutex);
        done = allreduce_processes(op, meeting->key, meeting->rows);
        pthread_mutex_lock(layer->mutex);
    }
    end(layer, meeting, done ? REDUCED : FAILED);
}

/* Wait until the exchange has ended, and ask Python now and then whether to wait on. */
static void wait_for_end(Layer *layer, Meeting *meeting, State *op)
{
    int64_t limit = now(CLOCK_MONOTONIC) + layer->patience;
    while (meeting->state == GATHERING || meeting->state == COMPLETE) {
        struct timespec time = timespec_of(limit);
        if (!pthread_cond_timedwait(&meeting->changed, layer->mutex, &time))
            continue;
        limit = now(CLOCK_MONOTONIC) + layer->patience;
        if (meeting->state != GATHERING)
            continue; /* all have come: the exchange with other processes has a limit of its own */
        int8_t arrived[meeting->num_devices]; /* a copy: others come meanwhile */
        memcpy(arrived, meeting->arrived, sizeof arrived);
        pthread_mutex_unlock(layer->mutex);
        gp_external.wait_on(op, meeting->key, arrived); /* it may close the layer */
        pthread_mutex_lock(layer->mutex);
    }
}

static int64_t allreduce_devices(Layer *layer, State *op, int64_t key)
{
    Meeting *meeting = 0;
    int64_t device = op->device, length = length_of(layer, key), stride = 1 + 2 * layer->channels, complete_at = 0;
    if (layer->is_open && device >= 0 && device < layer->num_devices && layer->takes_part[device])
        meeting = find(layer, key);
    if (!meeting || meeting->arrived[device]) { /* closed, unknown, or twice */
        pthread_mutex_unlock(layer->mutex);
        gp_external.refuse(op, key);
        pthread_mutex_lock(layer->mutex);
        return 0;
    }
    memcpy(meeting->rows + (1 + device) * stride, op->message, (size_t)length * sizeof(double));
    meeting->arrived[device] = 1;
    meeting->num_arrived++;
    if (meeting->num_arrived == layer->num_taking_part)
        complete_meeting(layer, meeting, op);
    else
        wait_for_end(layer, meeting, op);
    if (meeting->state == REDUCED) {
        memcpy(op->message, meeting->rows, (size_t)length * sizeof(double));
        complete_at = meeting->complete_at;
    }
    if (++meeting->num_left == meeting->num_arrived)
        meeting->state = FREE;
    return complete_at;
}

EXPORT int64_t gp_allreduce(State *op, int64_t key)
{
    Layer *layer = op->layer;
    pthread_mutex_lock(layer->mutex);
    int64_t complete_at = allreduce_devices(layer, op, key);
    pthread_mutex_unlock(layer->mutex);
    return complete_at;
}

EXPORT int64_t gp_waits_at(Layer *layer, int64_t device)
{
    int64_t key = -1;
    pthread_mutex_lock(layer->mutex);
    for (Meeting *meeting = layer->meetings; meeting; meeting = meeting->next)
        if (meeting->state == GATHERING && device >= 0 && device < meeting->num_devices && meeting->arrived[device])
            key = meeting->key;
    pthread_mutex_unlock(layer->mutex);
    return key;
}

EXPORT void gp_close_layer(Layer *layer)
{
    pthread_mutex_lock(layer->mutex);
    layer->is_open = 0;
    for (Meeting *meeting = layer->meetings; meeting; meeting = meeting->next)
        if (meeting->state == GATHERING)
            end(layer, meeting, FAILED);
    pthread_mutex_unlock(layer->mutex);
}

EXPORT void gp_open_layer(Layer *layer, int64_t is_open)
{
    pthread_mutex_lock(layer->mutex);
    while (layer->meetings) {
        Meeting *meeting = layer->meetings;
        layer->meetings = meeting->next;
        pthread_cond_destroy(&meeting->changed);
        free(meeting->rows);
        free(meeting->arrived);
        free(meeting);
    }
    layer->is_open = is_open;
    pthread_mutex_unlock(layer->mutex);
}

void add_spent(State *op, int64_t direction, int64_t began, int64_t processor)
{
    Layer *layer = op->layer;
    int64_t ended = now(CLOCK_MONOTONIC);
    if (op->arrived_at < began) /* it exchanged nothing */
        op->arrived_at = op->complete_at = op->reduced_at = ended;
    else if (!op->complete_at) /* it failed */
        op->complete_at = op->reduced_at;
    pthread_mutex_lock(layer->mutex);
    layer->in_callbacks += ended - began;
    layer->processor += processor;
    layer->waited += op->complete_at - op->arrived_at;
    layer->exchanged += op->reduced_at - op->complete_at;
    if (layer->passes)
        layer->passes[layer->num_passes++ % NUM_PASSES] = (PassTimes){
            op->device, 2 * op->call + direction, began, op->arrived_at, op->complete_at, op->reduced_at, ended,
        };
    pthread_mutex_unlock(layer->mutex);
}
