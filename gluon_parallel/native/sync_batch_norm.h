/* SyncBatchNorm's custom operator: its state, the steps of its passes, and the meeting of a layer's devices. */
#ifndef SYNC_BATCH_NORM_H
#define SYNC_BATCH_NORM_H

#include <stdint.h>

#include "host.h"

struct State;
struct Layer;

/* A number that threads count up. */
typedef struct Counter {
    _Atomic int64_t value;
} Counter;

/* Stages of a layer's passes. Each notes a failure in the state. A shard's vectors are on the host, in the state. */
typedef struct Arithmetic {
    void (*open)(struct State *);         /* at the beginning of a pass */
    void (*measure)(struct State *);      /* the message becomes the shard's moments, (1 + 2C,) */
    void (*use_batch)(struct State *);    /* use the batch's mean and variance; update the running statistics by them */
    void (*use_running)(struct State *);  /* use the running statistics as they are now */
    void (*normalise)(struct State *);    /* y = (x - mean) * rstd * gamma + beta */
    void (*sums)(struct State *);         /* dgamma and dbeta of this shard; the message becomes (2C,): sum dy,
                                             sum dy * (x - mean) */
    void (*gradient)(struct State *);     /* dx = gamma * rstd * (dy - mean of dy - xhat * mean of dy * xhat), the means
                                             those of the message */
    void (*close)(struct State *);        /* at the end of a pass, however it has ended */
} Arithmetic;

#define MOST_INPUTS 8 /* of a graph */

/* A graph of MXNet's operators, or one operator with parameters; see `operators.c`. */
typedef struct Graph {
    void *handle; /* of MXNet's CachedOp, or of an operator that has parameters */
    int64_t num_parameters;
    const char **keys; /* the parameters' names and values */
    const char **values;
    int64_t num_inputs;
    int64_t inputs[MOST_INPUTS]; /* where the inputs' handles are: bytes from the beginning of the State */
} Graph;

enum { WIDEN, MEASURE, UPDATE_RUNNING, USE_RUNNING, NORMALISE, SUMS, PARAMETER_GRADIENTS, GRADIENT, NARROW, ADD_TO,
       NUM_GRAPHS };

enum { FORWARD, BACKWARD }; /* directions of an exchange: moments, and sums */

#define HEADER 2 /* numbers before the values of a message between processes: how many take part, and the call's number */

enum { NOT_FAILED, MXNET_FAILED, NOT_REDUCED, NO_FORWARD }; /* why a pass fails */
enum { NOTHING = 0, ADD = 3 };                              /* of MXNet's requests; the others mean write */

/* That of float32 or float64 in memory, in the version for that processor, or for this machine's if it is below 0; and that
   of MXNet's operators. */
const Arithmetic *gp_arithmetic_in_memory(int64_t is_double, int64_t processor);
const Arithmetic *gp_arithmetic_of_operators(void);

/* One call of one layer on one device, until its backward pass is done; then it is used again. Python owns the memory of
   all that it points to. */
typedef struct State {
    struct Layer *layer;
    int64_t device; /* its index in the layer */
    Counter *calls; /* of this device */
    const Arithmetic *arithmetic;
    int64_t is_double; /* whether its arrays, or those that it makes of them, are float64; else float32 */
    int64_t outer;     /* the shape of x, with the channels in the middle: (outer, channels, inner) */
    int64_t channels;
    int64_t inner;
    double momentum;
    double epsilon;
    int64_t fix_gamma; /* gamma is 1, whatever it says */
    int64_t constant;  /* the statistics are constants also while training */
    double *mean;      /* (C,), as the next two: what the forward pass uses; see `use_batch` of MXNet's operators */
    double *variance;
    double *rstd;
    double count;        /* values per channel in the whole batch */
    double *message;     /* (1 + 2C,): what is brought to an exchange, and taken from it */
    double *scratch;     /* (5, C), for the arithmetic on memory */
    int64_t call;        /* number of the forward pass among the device's calls; -1 if its statistics were constants */
    int64_t arrived_at;  /* nanoseconds of the monotonic clock: when this device came to its last exchange */
    int64_t complete_at; /* when all devices had come */
    int64_t reduced_at;  /* when the exchange had ended */
    int64_t valid;       /* whether the last forward pass succeeded */
    int64_t failed;      /* why this pass fails */
    /* Arrays of a pass, or NULL: handles, or addresses of values where the arithmetic's `open` has looked these up. */
    void *x, *gamma, *beta, *y, *running_mean, *running_variance, *dy, *dx, *dgamma, *dbeta;
    int64_t adds, adds_gamma, adds_beta; /* whether to add to y or dx; to dgamma; to dbeta */
    /* The rest is of MXNet's operators only; Python's `operator_graphs` says what the arrays are. */
    const Graph *graphs;     /* (NUM_GRAPHS,) */
    int64_t is_narrow;       /* whether x, and gamma, have another dtype than is computed in */
    int64_t gamma_is_narrow;
    double *staging;         /* (7C,): what goes to the device or comes from it, the rows of `BATCH_ROWS` in their order */
    void *copied;            /* the same in the device's dtype; the same memory if that is float64 */
    void *pivot, *centre, *batch_variance, *mean_share, *variance_share, *batch_mean, *residual; /* of (C,), each */
    void *sum_dy, *dot, *slope, *intercept, *ones, *zeros;
    void *measured_rows, *batch_rows, *sums_rows, *gradient_rows;
    void *scale;   /* gamma, or ones, in the dtype that is computed in; as the next, while a pass runs */
    void *centred; /* x or x - pivot, (outer, C, inner) */
    void *origin;  /* its mean */
    void *scaled;  /* dy * scale * rstd, (outer, C, inner) */
    void *total;   /* what is added up */
    void *value;
    int64_t num_temporaries;
    void *temporaries[16]; /* to be freed at the end of a pass */
} State;

/* An exchange with the processes of this host through shared memory. */
typedef struct Processes {
    void *mutex; /* the store's, for this key: one exchange at a time */
    Host *host;
    HostKey *key;
    int64_t num_processes;
    double *row;  /* (HEADER + length,): header and values of this process */
    double *rows; /* (num_processes, HEADER + length): those of all */
} Processes;

#define NUM_PASSES 4096 /* of a ring of PassTimes */

/* One pass of one device; times are nanoseconds of the monotonic clock. */
typedef struct PassTimes {
    int64_t device; /* its number */
    int64_t key;    /* 2 * call + direction */
    int64_t began;
    int64_t arrived;  /* at the exchange; where there was none, this and the next two are those of its end */
    int64_t complete; /* all devices of this process had arrived */
    int64_t reduced;  /* the exchange had ended, with the other processes too */
    int64_t ended;
} PassTimes;

/* The rendezvous of one layer's devices. Python writes to it between steps, or while it holds the mutex. */
typedef struct Layer {
    void *mutex;     /* guards all of this, and the exchanges */
    int64_t is_open; /* 0 once an exchange has failed */
    int64_t num_devices;
    const int8_t *takes_part; /* (num_devices,): which devices take part */
    int64_t num_taking_part;
    int64_t channels;
    struct Meeting *meetings;  /* the exchanges between the devices that are under way, and free ones */
    int64_t patience;          /* nanoseconds between two questions of a device that waits, see `External` */
    int64_t spans_processes;   /* whether the last device to come exchanges with other processes */
    int64_t without_samples;   /* whether this process has no samples in this step */
    Processes *processes[2];   /* for each direction; NULL where only Python exchanges */
    int64_t earlier_calls;     /* of this process, before its count began anew; the others see the sum of both */
    int64_t in_callbacks;      /* nanoseconds that all devices together spent in the operator's passes */
    int64_t processor;         /* the same in processor time */
    int64_t waited;            /* of it, for other devices */
    int64_t exchanged;         /* of it, with other processes */
    Recorder *recorder;
    int64_t names[2];          /* the flight recorder's numbers of the rendezvous in each direction */
    PassTimes *passes;         /* a ring; NULL while nobody records */
    int64_t num_passes;        /* recorded since then */
} Layer;

/* Exchange `op->message` with all devices and processes: see `rendezvous.c`. Returns when the last device of this process
   arrived, in nanoseconds of the monotonic clock; 0 after a failure, which Python knows. */
int64_t gp_allreduce(State *op, int64_t key);

/* The key of an exchange at which that device waits for others; -1 if there is none. */
int64_t gp_waits_at(Layer *layer, int64_t device);

/* Fail the exchanges that are not complete, and all later ones, until the layer is opened. Any thread may call it. */
void gp_close_layer(Layer *layer);

/* Begin anew, or free all memory if `is_open` is 0; no device is in an exchange. */
void gp_open_layer(Layer *layer, int64_t is_open);

/* A pass that began then has ended, and took so much processor time. */
void add_spent(State *op, int64_t direction, int64_t began, int64_t processor);

/* Python calls it: messages of processes (num, size) give that of all, (size,); see `combine`. The header is combined as
   well; the call's number becomes NaN where the processes' numbers differ. */
void gp_combine_messages(const double *rows, int64_t num, int64_t size, int64_t direction, double *result);

/* MXNet's callbacks for the passes of an operator. */
int gp_forward(int num, void **arrays, const int *tags, const int *requests, int is_training, State *op);
int gp_backward(int num, void **arrays, const int *tags, const int *requests, int is_training, State *op);

/* MXNet's MXCallbackList: the functions of an operator's description, or of an operator, and a context for each. */
typedef struct CallbackList {
    int64_t num;
    void **functions;
    void **contexts;
} CallbackList;

/* The part of an operator's description that MXNet is told. */
typedef struct Description {
    int32_t *dependencies; /* the indices of the arrays that MXNet keeps for the backward pass */
    int64_t num_dependencies;
    int64_t axis; /* of the channels */
} Description;

/* What `gp_delete` is called with when MXNet deletes an operator or its description. */
typedef struct Deletion {
    Interpreter *python;
    int (*function)(int64_t);
    int64_t argument;
} Deletion;

#endif
