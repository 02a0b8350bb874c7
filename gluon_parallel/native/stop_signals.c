/* Stop signals in a daemon, such as a DataLoader's worker: ignored while its parent stops by itself. */
#include <signal.h>
#include <stdint.h>
#include <unistd.h>

#include "external.h"

static const volatile int64_t *stopping; /* the process that stops by itself, or 0; in memory shared with the parent */
static struct sigaction before[32];

/* A signal to the whole process group has another sender than the parent's request to end. */
static void leave_to_parent(int number, siginfo_t *about, void *context)
{
    pid_t parent = getppid();
    if (*stopping == parent && about->si_pid != parent)
        return;
    if (before[number].sa_flags & SA_SIGINFO) {
        before[number].sa_sigaction(number, about, context);
    } else if (before[number].sa_handler == SIG_DFL) {
        signal(number, SIG_DFL);
        raise(number); /* it comes when this function returns */
    } else {
        before[number].sa_handler(number);
    }
}

/* From now on, in this process, the signal `number` is handled so, unless it is ignored; returns 0, or -1. */
EXPORT int64_t gp_leave_to_parent(int64_t number, int64_t address)
{
    struct sigaction ours = {.sa_sigaction = leave_to_parent, .sa_flags = SA_SIGINFO | SA_RESTART};
    if (number < 1 || number >= 32 || sigaction((int)number, NULL, &before[number]))
        return -1;
    if (!(before[number].sa_flags & SA_SIGINFO) && before[number].sa_handler == SIG_IGN)
        return 0;
    stopping = (const volatile int64_t *)address;
    sigemptyset(&ours.sa_mask);
    return sigaction((int)number, &ours, NULL);
}
