/* Repairs of Open MPI 5.0, where a process is lost while others exchange or make a communicator: functions in the place of
   its own, and of one of PMIx.

   Open MPI calls its functions through the dynamic linker, which takes these where they are known to all libraries before
   Open MPI is loaded. Each calls the one that it stands for, where that is safe. Without them, the processes that are left
   - crash: the loss is noted in each communicator, also where its collective operations are still to be chosen
     (`ompi_comm_revoke_local`);
   - or wait for ever for one that has given up: it lets go of what it has made, without a word to those that wait for it
     there (`ompi_dpm_connect_accept`);
   - or wait for ever: a request that consists of others forgets that the last one has failed, so the search for a number
     of the communicator is repeated, and fails, without end (`ompi_comm_request_progress`);
   - or wait for ever: mpirun, which all ask to connect them, waits for one that it has just lost; or it loses one more just
     as it answers, and frees twice what it knows of the question (`ompi_dpm_connect_accept`, `PMIx_Connect`);
   - or end with status 7: a collective operation that has failed frees what it has sent and received, of which some ends
     later, with an error that is nobody's any more (`NBC_Progress`, `mca_pml_ob1_recv_request_fini`). */
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "external.h"

#define PROC_FAILED 75   /* MPI_ERR_PROC_FAILED */
#define REQUEST 7        /* MPI_ERR_REQUEST */
#define LOST_CLIENT -103 /* PMIX_ERR_LOST_CONNECTION_TO_CLIENT */

typedef struct Communicators {
    void **all;
    int num, room;
} Communicators;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of the lists */
static Communicators finished;                           /* those that have collective operations */
static Communicators missed;                             /* others, of which a process was lost */
static Communicators young;                              /* those of `finished` that were made in a meeting under way */
static _Atomic int num_failures, num_revoked;
static _Atomic int num_failures_before = -1, num_revoked_before; /* where processes began to meet; -1: nobody meets */
static void *_Atomic to_revoke; /* a communicator that another thread wants revoked by the one in which MPI waits */

static void add(Communicators *to, void *comm)
{
    if (to->num == to->room) {
        to->room = 2 * to->room + 16;
        to->all = realloc(to->all, to->room * sizeof *to->all);
        if (!to->all)
            abort();
    }
    to->all[to->num++] = comm;
}

/* The place of a communicator; `num` if it is not there. */
static int find(const Communicators *in, const void *comm)
{
    int place = 0;
    while (place < in->num && in->all[place] != comm)
        place++;
    return place;
}

/* Returns whether it was there. */
static bool drop(Communicators *from, const void *comm)
{
    int place = find(from, comm);
    if (place == from->num)
        return false;
    from->all[place] = from->all[--from->num];
    return true;
}

/* The function of that name, of Open MPI or of a library that it needs, called from `caller`. Its first call, when it makes
   its first communicator, comes from its own library. Later ones may come through a library below, which has no such
   function: as for a broken connection, of which the lower one tells it. */
static void *function_of(const void *caller, const char *name)
{
    static void *library;
    Dl_info info;
    if (!library && dladdr(caller, &info))
        library = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    void *found = library ? dlsym(library, name) : NULL;
    if (!found) {
        fprintf(stderr, "gluon_parallel: Open MPI knows no function %s\n", name);
        abort();
    }
    return found;
}

#define OWN(type, name) \
    static type *own;   \
    if (!own)           \
        own = (type *)function_of(__builtin_return_address(0), #name)

typedef int (*Callback)(void *request);
typedef bool Revoke(void *comm, bool only_collectives);
typedef int Collectives(void *comm);
typedef int Failed(void *process, int status, bool forward);
typedef void Fatal(void *comm, int *error, ...);
typedef int Append(void *request, Callback callback, void **parts, int num_parts);
typedef int Progress(void);
typedef int Register(Progress *progress);
typedef int RevokeAll(void *comm);

typedef struct Process { /* pmix_proc_t */
    char job[256];
    uint32_t rank;
} Process;

typedef struct Answer {
    int status;
    _Atomic bool is_there;
} Answer;

typedef void Answered(int status, void *value, void *answer);
typedef int Get(const Process *process, const char *key, const void *options, size_t num_options, Answered *answered,
                void *answer);
typedef int Connect(const Process *processes, size_t num_processes, const void *options, size_t num_options);

static Revoke *own_revoke;

static void find_revoke(const void *caller)
{
    if (!own_revoke)
        own_revoke = (Revoke *)function_of(caller, "ompi_comm_revoke_local");
}

/* Whether processes meet, and one was lost since they began to. */
static bool has_lost_in_meeting(void)
{
    return num_failures_before >= 0 && num_failures != num_failures_before;
}

/* Whether processes meet, and it cannot succeed any more: one was lost, or a communicator was revoked. Where a process was
   lost before and is reported once more, it is given up without need, and another one is met later. */
static bool has_failed_to_meet(void)
{
    return has_lost_in_meeting() || (num_failures_before >= 0 && num_revoked != num_revoked_before);
}

/* Note in a communicator that it is revoked, or that a process of it was lost. */
EXPORT bool ompi_comm_revoke_local(void *comm, bool only_collectives)
{
    find_revoke(__builtin_return_address(0));
    pthread_mutex_lock(&lock);
    bool is_finished = find(&finished, comm) < finished.num;
    if (!is_finished && find(&missed, comm) == missed.num)
        add(&missed, comm);
    pthread_mutex_unlock(&lock);
    bool is_changed = is_finished && own_revoke(comm, only_collectives);
    num_revoked += is_changed;
    return is_changed;
}

/* Choose the collective operations of a communicator, the last thing that it needs. */
EXPORT int mca_coll_base_comm_select(void *comm)
{
    OWN(Collectives, mca_coll_base_comm_select);
    find_revoke(__builtin_return_address(0));
    int error = own(comm);
    pthread_mutex_lock(&lock);
    bool has_missed = drop(&missed, comm);
    if (!error)
        add(&finished, comm);
    if (!error && num_failures_before >= 0)
        add(&young, comm);
    pthread_mutex_unlock(&lock);
    if (!error && (has_missed || has_lost_in_meeting()))
        num_revoked += own_revoke(comm, !has_lost_in_meeting());
    return error;
}

/* Let go of a communicator's collective operations: it is freed. */
EXPORT int mca_coll_base_comm_unselect(void *comm)
{
    OWN(Collectives, mca_coll_base_comm_unselect);
    pthread_mutex_lock(&lock);
    drop(&finished, comm);
    drop(&missed, comm);
    drop(&young, comm);
    pthread_mutex_unlock(&lock);
    return own(comm);
}

/* Note that a process was lost. In a meeting, all that was made for it ends, also between processes that are not lost. */
EXPORT int ompi_errhandler_proc_failed_internal(void *process, int status, bool forward)
{
    OWN(Failed, ompi_errhandler_proc_failed_internal);
    num_failures++;
    int error = own(process, status, forward);
    pthread_mutex_lock(&lock);
    int num = num_failures_before >= 0 ? young.num : 0;
    void *comms[num + 1];
    for (int i = 0; i < num; i++)
        comms[i] = young.all[i];
    pthread_mutex_unlock(&lock);
    for (int i = 0; i < num; i++)
        own_revoke(comms[i], false);
    return error;
}

/* End the program by an error. One without a communicator is of a request that was freed before: after a loss, it follows
   from that. */
EXPORT void ompi_mpi_errors_are_fatal_comm_handler(void *comm, int *error, ...)
{
    if (!comm && *error == REQUEST && num_failures + num_revoked > 0)
        return;
    OWN(Fatal, ompi_mpi_errors_are_fatal_comm_handler);
    va_list arguments;
    va_start(arguments, error);
    const char *where = va_arg(arguments, const char *);
    va_end(arguments);
    own(comm, error, where, NULL);
}

/* The end of a request that consists of others. */
static int end(void *request)
{
    (void)request;
    return has_lost_in_meeting() ? PROC_FAILED : 0;
}

/* Add a part to a request that consists of others, with what is called behind it. */
EXPORT int ompi_comm_request_schedule_append(void *request, Callback callback, void **parts, int num_parts)
{
    OWN(Append, ompi_comm_request_schedule_append);
    return own(request, callback ? callback : end, parts, num_parts);
}

static void note_answer(int status, void *value, void *answer)
{
    (void)value; /* PMIx keeps it */
    Answer *to = answer;
    to->status = status;
    to->is_there = true;
}

/* Have PMIx know all about a process of another job that Open MPI asks for when it first sends to it: its addresses, which
   come with the value of a key, see `offer_addresses`.

   mpirun does not answer about a process whose job has ended. So it is waited for as long as all can still meet; Open MPI
   notes losses in `opal_progress`. One after the other: with two under way, PMIx reads memory that it has freed. */
static int get_addresses(const Process *process, Get *get, Progress *progress)
{
    Answer *answer = calloc(1, sizeof *answer);
    if (!answer)
        abort();
    int status = get(process, "gluon_parallel.addresses", NULL, 0, note_answer, answer);
    const struct timespec pause = {.tv_nsec = 100000};
    while (!status && !answer->is_there) {
        if (has_failed_to_meet())
            return LOST_CLIENT; /* `answer` is not freed: mpirun may still answer */
        progress();
        nanosleep(&pause, NULL);
    }
    status = status ? status : answer->status;
    free(answer);
    return status;
}

/* Have mpirun connect processes; where they meet, get from it only what Open MPI needs for that. */
EXPORT int PMIx_Connect(const Process *processes, size_t num_processes, const void *options, size_t num_options)
{
    OWN(Connect, PMIx_Connect);
    if (num_failures_before < 0)
        return own(processes, num_processes, options, num_options);
    Get *get = (Get *)function_of(NULL, "PMIx_Get_nb");
    Progress *progress = (Progress *)function_of(NULL, "opal_progress");
    progress();
    int status = has_failed_to_meet() ? LOST_CLIENT : 0;
    const char *own_job = getenv("PMIX_NAMESPACE");
    for (size_t i = 0; i < num_processes && !status; i++)
        if (strcmp(processes[i].job, own_job ? own_job : ""))
            status = get_addresses(&processes[i], get, progress);
    return status;
}

/* Called by Open MPI again and again while it waits. Returns how much it has done. */
static int revoke_if_asked(void)
{
    void *comm = atomic_exchange(&to_revoke, NULL);
    if (!comm)
        return 0;
    ((RevokeAll *)function_of(NULL, "MPIX_Comm_revoke"))(comm);
    return 1;
}

/* Have Open MPI call that function from now on, or no longer, by the name of a function of its own. */
static void tell_open_mpi(const char *name)
{
    if (finished.num)
        ((Register *)function_of(NULL, name))(revoke_if_asked);
}

/* Before processes meet: a loss from here on ends what they make together. Returns whether Open MPI calls these
   functions. */
EXPORT int64_t gp_before_meeting(void)
{
    num_revoked_before = num_revoked;
    num_failures_before = num_failures;
    to_revoke = NULL;
    tell_open_mpi("opal_progress_register");
    return finished.num > 0;
}

/* Called from another thread: have MPI revoke a communicator in the thread in which it waits. */
EXPORT int64_t gp_revoke_in_meeting(int64_t comm)
{
    to_revoke = (void *)comm;
    return 0;
}

/* After it, also where it has failed: a loss is noted as usual. */
EXPORT void gp_after_meeting(void)
{
    tell_open_mpi("opal_progress_unregister");
    pthread_mutex_lock(&lock);
    num_failures_before = -1;
    young.num = 0;
    pthread_mutex_unlock(&lock);
}
