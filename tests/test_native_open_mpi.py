"""Repairs of Open MPI: they take the place of functions of a library with its names, which does what it does."""

import os
import subprocess
import sys

from gluon_parallel.native import build

LIKE_OPEN_MPI = """
#include <stdbool.h>
#include <stddef.h>

int num_crashes, num_revoked;
static char complete[4], revoked[4];
static int (*at_end)(void *);

bool ompi_comm_revoke_local(void *comm, bool only_collectives)
{
    (void)only_collectives;
    num_crashes += !complete[(size_t)comm];
    num_revoked++;
    bool is_changed = !revoked[(size_t)comm];
    return revoked[(size_t)comm] = 1, is_changed;
}

int mca_coll_base_comm_select(void *comm) { return complete[(size_t)comm] = 1, 0; }
int mca_coll_base_comm_unselect(void *comm) { return complete[(size_t)comm] = revoked[(size_t)comm] = 0; }
int num_fatal;
void ompi_mpi_errors_are_fatal_comm_handler(void *comm, int *error, ...) { (void)comm, num_fatal += *error; }
void fail_after_freed(int error) { ompi_mpi_errors_are_fatal_comm_handler(NULL, &error, "after request freed"); }
void fail_in(void *comm, int error) { ompi_mpi_errors_are_fatal_comm_handler(comm, &error, "MPI_Test", NULL); }
int ompi_errhandler_proc_failed_internal(void *a, int b, bool c) { return (void)a, (void)b, (void)c, 0; }

int ompi_comm_request_schedule_append(void *request, int (*callback)(void *), void **parts, int num)
{
    (void)request, (void)parts, (void)num;
    at_end = callback;
    return 0;
}

typedef struct Process { char job[256]; unsigned rank; } Process;
static Process processes[] = {{"other", 0}, {"own", 0}, {"own", 1}, {"other", 1}};
typedef void Answered(int, void *, void *);
static Answered *answer;
static void *to;
int num_asked, num_connected, num_progress, lose_at, revoke_at, answer_at, next_at, refused_at, asked_for;
size_t revoked_one;
int PMIx_Get_nb(const Process *one, const char *key, void *a, size_t b, Answered *answered, void *data)
{
    (void)a, (void)b;
    answer = answered, to = data;
    asked_for = 10 * asked_for + (one->job[1] == 't' && key[0] == 'g' ? one->rank + 1 : 9);
    return ++num_asked == refused_at ? -27 : 0;
}
int PMIx_Connect(const Process *all, size_t num, void *c, size_t d)
{
    (void)all, (void)num, (void)c, (void)d;
    return num_connected++, -5;
}
int connect_processes(void) { return PMIx_Connect(processes, 4, NULL, 0); }
int opal_progress(void)
{
    num_progress++;
    if (num_progress == lose_at)
        ompi_errhandler_proc_failed_internal(NULL, 0, true);
    if (num_progress == revoke_at)
        ompi_comm_revoke_local((void *)revoked_one, false);
    if (num_progress == answer_at)
        answer(0, NULL, to);
    if (num_progress == next_at)
        answer(-1, NULL, to);
    return 0;
}
static int (*registered)(void);
int opal_progress_register(int (*function)(void)) { return registered = function, 0; }
int opal_progress_unregister(int (*function)(void)) { return (void)function, registered = NULL, 0; }
int wait_once(void) { return registered ? registered() : -1; }
int MPIX_Comm_revoke(void *comm) { return ompi_comm_revoke_local(comm, false), 0; }
void answer_late(void) { answer(0, NULL, to); }

void note_loss_in(size_t comm) { ompi_comm_revoke_local((void *)comm, true); }
void finish(size_t comm) { mca_coll_base_comm_select((void *)comm); }
void give_up(size_t comm) { mca_coll_base_comm_unselect((void *)comm); }
void lose(void) { ompi_errhandler_proc_failed_internal(NULL, 0, true); }
int end_of_last_part(void)
{
    ompi_comm_request_schedule_append(NULL, NULL, NULL, 0);
    return at_end ? at_end(NULL) : 0;
}
"""

PROGRAM = """
import ctypes, os, sys
from gluon_parallel import native

native.repair_open_mpi()
mpi = ctypes.CDLL(sys.argv[1])

def counts():
    return [ctypes.c_int.in_dll(mpi, name).value for name in ("num_crashes", "num_revoked")]

def sum_of_fatal():
    return ctypes.c_int.in_dll(mpi, "num_fatal").value

mpi.fail_after_freed(7)
assert sum_of_fatal() == 7, "nobody is lost"

FINISHED, UNFINISHED, GIVEN_UP = map(ctypes.c_size_t, (1, 2, 3))
mpi.finish(FINISHED)
mpi.note_loss_in(FINISHED)
assert counts() == [0, 1]
mpi.note_loss_in(UNFINISHED)
mpi.note_loss_in(GIVEN_UP)
assert counts() == [0, 1], "the loss is noted later"
mpi.give_up(GIVEN_UP)
mpi.finish(GIVEN_UP)  # another one at the same address
assert counts() == [0, 1]
mpi.finish(UNFINISHED)
assert counts() == [0, 2]

mpi.lose()
assert mpi.end_of_last_part() == 0, "nobody meets"
assert native.function("gp_before_meeting", 0)() == 1
assert mpi.end_of_last_part() == 0
YOUNG, LATE = map(ctypes.c_size_t, (1, 2))
mpi.give_up(FINISHED), mpi.give_up(UNFINISHED)
mpi.finish(YOUNG)
assert counts() == [0, 2]
mpi.lose()
assert counts() == [0, 3], "what is made in a meeting ends with a loss"
assert mpi.end_of_last_part() == 75
mpi.finish(LATE)
assert counts() == [0, 4], "and what is complete later"
native.function("gp_after_meeting", 0)()
mpi.lose()
assert mpi.end_of_last_part() == 0 and counts() == [0, 4], "as usual"

def connect(revoked=0, **at):
    # The status, how often Open MPI has looked at what happens, and which processes of the other job were asked for.
    names = ("lose_at", "revoke_at", "answer_at", "next_at", "refused_at", "num_progress", "num_asked", "asked_for")
    for name in names:
        ctypes.c_int.in_dll(mpi, name).value = at.get(name, 0)
    ctypes.c_size_t.in_dll(mpi, "revoked_one").value = revoked
    return mpi.connect_processes(), *(ctypes.c_int.in_dll(mpi, name).value for name in ("num_progress", "asked_for"))

os.environ["PMIX_NAMESPACE"] = "own"
FIRST, SECOND, UNKNOWN = 1, 2, 3
for one in (YOUNG, LATE, GIVEN_UP):
    mpi.give_up(one)
mpi.finish(YOUNG), mpi.finish(LATE)
mpi.note_loss_in(FIRST)
assert connect() == (-5, 0, 0), "nobody meets, and mpirun connects"
native.function("gp_before_meeting", 0)()
assert connect(answer_at=4, next_at=6) == (-1, 6, 12), "what mpirun answers about one, and about the other"
assert connect(next_at=4) == (-1, 4, 1), "it does not know the first one"
assert connect(refused_at=1) == (-27, 1, 1), "mpirun is not asked"
assert connect(FIRST, revoke_at=2, answer_at=4, next_at=6) == (-1, 6, 12), "it was revoked before"
assert connect(UNKNOWN, revoke_at=2, answer_at=4, next_at=6) == (-1, 6, 12), "it is nobody's yet"
assert connect(SECOND, revoke_at=3, answer_at=6) == (-103, 3, 1)
native.function("gp_before_meeting", 0)()
assert connect(answer_at=3, lose_at=5, next_at=8) == (-103, 5, 12)
mpi.answer_late()
assert mpi.wait_once() == 0
num_revoked = counts()[1]
native.function("gp_revoke_in_meeting", 1)(FIRST)
assert counts()[1] == num_revoked, "by the thread in which Open MPI waits"
assert (mpi.wait_once(), mpi.wait_once()) == (1, 0) and counts()[1] == num_revoked + 1
assert connect() == (-103, 1, 0), "the loss is known"
assert ctypes.c_int.in_dll(mpi, "num_connected").value == 1
native.function("gp_after_meeting", 0)()
assert mpi.wait_once() == -1, "it looks no longer"

mpi.fail_after_freed(7)
assert sum_of_fatal() == 7, "it follows from the loss"
mpi.fail_after_freed(1)
mpi.fail_in(ctypes.byref(ctypes.c_int()), 7)
assert sum_of_fatal() == 15
print("ok")
"""


def test_a_loss_is_noted_in_a_communicator_when_it_is_complete_ends_what_is_tried_or_waited_for_and_no_program(
    tmp_path,
):
    source, library = tmp_path / "like_open_mpi.c", tmp_path / "libmpi.so"
    source.write_text(LIKE_OPEN_MPI)
    command = [
        *build.compiler(),
        "-O0",
        "-fPIC",
        "-fsemantic-interposition",
        "-fno-sanitize=undefined",
        "-shared",
        str(source),
    ]
    caches = {"ZIG_GLOBAL_CACHE_DIR": str(tmp_path), "ZIG_LOCAL_CACHE_DIR": str(tmp_path)}
    subprocess.run([*command, "-nostdlib", "-o", str(library)], env={**os.environ, **caches}, check=True)
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(library)], capture_output=True, text=True)
    assert done.stdout == "ok\n", done.stderr
