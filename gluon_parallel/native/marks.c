/* Marks of gradients: which backward passes have written them.

   MXNet's backward pass marks the copies of parameters whose gradients it writes. The marks stay until an update takes
   them away, so they do not tell a pass of this step from one whose gradients no step has used. Here each copy also has
   the number of its *round*. A round is what backward passes do for one batch on all devices: one pass over them, or
   several, where a loop goes from device to device. A new round begins with a pass over a device that has had its pass in
   this round. There is one exception: a loop may do several passes on a device before it goes to the next one, such as
   one for the gradient of the input and one for the weights. So passes on one device behind each other stay in the round,
   on later devices as many as on the first. A gradient is fresh if the newest round that has reached its parameter wrote
   it; on other devices it is of an earlier batch. That is one device's rule: a gradient is that of the last pass that
   reached it.

   The rule reads the order of passes, so where several threads do them, all that is marked is fresh, as in MXNet. */
#include "marks.h"

#include <string.h>

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* for all below, and all records */
static Marks *first;
static int64_t num_running, num_joint; /* backward passes; those of all devices, which others are parts of */
static int64_t thread, has_several;    /* of the passes since the last time that none was running */
static _Atomic int has_new_gradients;
static _Thread_local int is_left_out; /* whether the passes of this thread do not count */
static _Thread_local int64_t num_joint_here; /* of `num_joint`, those that this thread has begun */
static _Thread_local int64_t own_number; /* of this thread; pthread_self() may be that of one that has ended */

static int is_marked(void *handle)
{
    int mark = 0;
    gp_external.MXNDArrayGetGradState(handle, &mark);
    return mark != 0;
}

/* A pass has written gradients on these devices: it begins a round, or belongs to the last one, if any is unused. */
static void begin_or_go_on(Marks *marks, const int8_t *written, int had_marks)
{
    int64_t num_written = 0, num_in_round = 0, num_again = 0;
    for (int64_t i = 0; i < marks->num_copies; i++) {
        num_written += written[i];
        num_in_round += marks->in_round[i];
        num_again += written[i] && marks->in_round[i];
        marks->passes[i] += written[i];
    }
    int is_at_once = had_marks && num_written == 1 && !memcmp(written, marks->in_last, (size_t)marks->num_copies);
    if (is_at_once && (num_in_round == 1 || marks->run < marks->first_run)) {
        marks->run++;
    } else {
        marks->run = 1;
        if (num_again || !had_marks) {
            marks->round++;
            memset(marks->in_round, 0, (size_t)marks->num_copies);
            num_in_round = 0;
        }
    }
    if (!num_in_round || (num_in_round == 1 && is_at_once))
        marks->first_run = marks->run;
    for (int64_t i = 0; i < marks->num_copies; i++)
        marks->in_round[i] |= written[i];
    memcpy(marks->in_last, written, (size_t)marks->num_copies);
    marks->is_unclear = has_several || (had_marks && (marks->is_unclear || marks->thread != thread));
    marks->thread = thread;
}

/* Give what was written since the last call the number of its round. */
static void note(Marks *marks)
{
    int64_t num_copies = marks->num_copies, num = marks->num_parameters * num_copies;
    int64_t num_written = 0, had_rounds = 0, has_rounds = 0; /* the last two before and after that */
    if (!num)
        return; /* there are no gradients, and no array may have a length of 0 */
    int8_t written[num_copies];
    memset(written, 0, (size_t)num_copies);
    for (int64_t i = 0; i < num; i++) {
        int mark = is_marked(marks->handles[i]);
        if (!mark && !marks->is_hidden)
            marks->rounds[i] = 0; /* taken away by MXNet or the caller */
        had_rounds |= marks->rounds[i];
        if (mark && (!marks->rounds[i] || marks->is_hidden)) {
            marks->rounds[i] = -1;
            num_written++;
            written[i % num_copies] = 1;
        }
        has_rounds |= marks->rounds[i];
    }
    marks->has_news = num_running > 0; /* a pass in another thread may set more */
    marks->has_rounds = has_rounds != 0;
    if (num_written)
        begin_or_go_on(marks, written, had_rounds != 0);
    for (int64_t i = 0; i < num; i++) {
        if (marks->rounds[i] < 0)
            marks->rounds[i] = marks->round;
    }
}

/* Take MXNet's marks away from what has a round, or put them back. */
static void hide(Marks *marks, int is_hidden)
{
    marks->is_hidden = is_hidden;
    for (int64_t i = 0; i < marks->num_parameters * marks->num_copies; i++) {
        if (marks->rounds[i])
            gp_external.MXNDArraySetGradState(marks->handles[i], !is_hidden);
    }
}

/* The number of the thread that calls; with the mutex held. */
static int64_t this_thread(void)
{
    static int64_t num_threads;
    if (!own_number)
        own_number = ++num_threads;
    return own_number;
}

static void begin(int is_joint)
{
    pthread_mutex_lock(&mutex);
    if (!num_running++) {
        for (Marks *marks = first; marks; marks = marks->next) {
            if (marks->has_news || marks->has_rounds)
                note(marks);
        }
        for (Marks *marks = first; marks; marks = marks->next) { /* two may have the same copies, so all note first */
            if (marks->has_rounds)
                hide(marks, 1);
        }
        thread = this_thread();
        has_several = 0;
    } else if (!num_joint) {
        has_several |= thread != this_thread();
    }
    num_joint += is_joint;
    for (Marks *marks = first; marks; marks = marks->next)
        marks->has_news = 1;
    pthread_mutex_unlock(&mutex);
}

static void end(int is_joint)
{
    pthread_mutex_lock(&mutex);
    num_joint -= is_joint;
    if (!--num_running) {
        for (Marks *marks = first; marks; marks = marks->next) {
            if (marks->is_hidden)
                note(marks);
        }
        for (Marks *marks = first; marks; marks = marks->next) {
            if (marks->is_hidden)
                hide(marks, 0);
        }
    }
    pthread_mutex_unlock(&mutex);
}

/* Before and after the backward passes of all devices, which are one. Ctrl-C may come between a call and what Python does
   next, so `gp_end_passes` is told how many of this thread were under way before, and ends what has begun since then. */
EXPORT int64_t gp_num_passes(void)
{
    return num_joint_here;
}

EXPORT void gp_begin_pass(void)
{
    num_joint_here++;
    begin(1);
}

EXPORT void gp_end_passes(int64_t num_before)
{
    for (; num_joint_here > num_before; num_joint_here--)
        end(1);
}

/* Parameters have got new gradients, which are to be watched from their first backward pass. */
EXPORT void gp_note_new_gradients(void)
{
    has_new_gradients = 1;
}

/* In the place of MXNet's function: the backward pass from the heads. With `variables` it marks nothing. */
EXPORT int gp_go_backward(unsigned num_heads, void **heads, void **gradients, unsigned num_variables, void **variables,
                          int keeps_graph, int makes_graph, int is_train, void ***outputs, int **storage_types)
{
    int counts = !num_variables && !is_left_out;
    if (counts && has_new_gradients) {
        has_new_gradients = 0;
        gp_external.make_reducers();
    }
    if (counts)
        begin(0);
    int status = gp_external.MXAutogradBackwardEx(num_heads, heads, gradients, num_variables, variables, keeps_graph,
                                                  makes_graph, is_train, outputs, storage_types);
    if (counts)
        end(0);
    return status;
}

/* The backward passes of this thread are parts of other ones, and reach no parameter themselves. */
EXPORT void gp_leave_out_passes(void)
{
    is_left_out = 1;
}

/* In a forked process no thread but this one is in a backward pass. */
static void lock_before_fork(void)
{
    pthread_mutex_lock(&mutex);
}

static void unlock_after_fork(void)
{
    pthread_mutex_unlock(&mutex);
}

static void unlock_in_child(void)
{
    num_running = num_joint = num_joint_here = 0;
    for (Marks *marks = first; marks; marks = marks->next) {
        if (marks->is_hidden)
            hide(marks, 0);
    }
    pthread_mutex_unlock(&mutex);
}

/* Where `other` has this value, looked for from `start` on; -1: nowhere. */
static int64_t find(const Marks *other, const void *handle, int64_t start)
{
    int64_t num = other->num_parameters * other->num_copies;
    for (int64_t i = 0; i < num; i++) {
        int64_t where = (start + i) % num;
        if (other->handles[where] == handle)
            return where;
    }
    return -1;
}

/* Start with the rounds that are known of the same gradients: those of another trainer, or of the same trainer's
   parameters before one of them was frozen. Of several records, that one counts which has most of them. */
static void inherit(Marks *marks)
{
    int64_t num = marks->num_parameters * marks->num_copies, most = 0;
    Marks *known = NULL;
    for (Marks *other = first; other; other = other->next) {
        int64_t num_found = 0, start = 0;
        for (int64_t i = 0; i < num && other->num_copies == marks->num_copies; i++) {
            int64_t where = find(other, marks->handles[i], start);
            num_found += where >= 0;
            start = where + 1;
        }
        if (num_found > most) {
            most = num_found;
            known = other;
        }
    }
    if (!known)
        return;
    if (!known->is_hidden)
        note(known);
    for (int64_t i = 0, start = 0; i < num; i++) {
        int64_t where = find(known, marks->handles[i], start);
        marks->rounds[i] = where < 0 ? 0 : known->rounds[where];
        start = where + 1;
    }
    memcpy(marks->in_round, known->in_round, (size_t)marks->num_copies);
    memcpy(marks->in_last, known->in_last, (size_t)marks->num_copies);
    marks->has_rounds = known->has_rounds;
    marks->round = known->round;
    marks->run = known->run;
    marks->first_run = known->first_run;
    marks->thread = known->thread;
    marks->is_unclear = known->is_unclear;
}

/* From now on, note the rounds of these gradients. */
EXPORT void gp_watch(Marks *marks)
{
    static int64_t is_ready;
    pthread_mutex_lock(&mutex);
    inherit(marks);
    marks->next = first;
    first = marks;
    int64_t was_ready = is_ready;
    is_ready = 1;
    pthread_mutex_unlock(&mutex);
    if (!was_ready)
        pthread_atfork(lock_before_fork, unlock_after_fork, unlock_in_child);
}

EXPORT void gp_unwatch(Marks *marks)
{
    pthread_mutex_lock(&mutex);
    for (Marks **link = &first; *link; link = &(*link)->next) {
        if (*link == marks) {
            *link = marks->next;
            break;
        }
    }
    if (marks->is_hidden)
        hide(marks, 0);
    pthread_mutex_unlock(&mutex);
}

/* Write which gradients are fresh, from those of parameter `begin` to before `end`; returns the number of fresh ones. */
EXPORT int64_t gp_get_marks(Marks *marks, int64_t begin, int64_t end, int8_t *fresh)
{
    int64_t num_fresh = 0;
    pthread_mutex_lock(&mutex);
    int is_whole = begin == 0 && end == marks->num_parameters;
    if (!marks->is_hidden && (marks->has_news || is_whole))
        note(marks);
    for (int64_t parameter = begin; parameter < end; parameter++) {
        int32_t *rounds = marks->rounds + parameter * marks->num_copies, newest = 0;
        for (int64_t i = 0; i < marks->num_copies; i++) {
            if (!is_whole && !marks->is_hidden) { /* the caller may have set or taken away the mark since `note` */
                int mark = is_marked(marks->handles[parameter * marks->num_copies + i]);
                rounds[i] = !mark ? 0 : rounds[i] ? rounds[i] : marks->round;
                marks->has_rounds |= mark;
            }
            newest = rounds[i] > newest ? rounds[i] : newest;
        }
        for (int64_t i = 0; i < marks->num_copies; i++) {
            *fresh = rounds[i] && (rounds[i] == newest || marks->adds[parameter] || marks->is_unclear);
            num_fresh += *fresh++;
        }
    }
    pthread_mutex_unlock(&mutex);
    return num_fresh;
}

/* Mark the gradients of these parameters as written by the next round, or as used. */
EXPORT void gp_set_marks(Marks *marks, int64_t begin, int64_t end, int64_t mark)
{
    pthread_mutex_lock(&mutex);
    for (int64_t i = begin * marks->num_copies; i < end * marks->num_copies; i++) {
        gp_external.MXNDArraySetGradState(marks->handles[i], (int)mark);
        marks->rounds[i] = 0;
    }
    if (mark)
        marks->has_news = 1;
    else if (begin == 0 && end == marks->num_parameters && !num_running)
        marks->has_news = marks->has_rounds = 0;
    pthread_mutex_unlock(&mutex);
}
