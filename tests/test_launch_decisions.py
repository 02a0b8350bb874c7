"""The launcher's decisions follow from what agents say and from the clock; here both are made up, second by second."""

import json
import re
import signal
import types

import pytest

from gluon_parallel import launcher
from gluon_parallel.launch.decisions import Decisions
from gluon_parallel.launch.ending import Ending
from gluon_parallel.launch.logs import Logs

TICK = 0.25  # seconds between two looks
ADVICE = "to start again: --max-restarts N"


class Group:
    """A group of processes that are made up.

    At each second `events` names, a member of the group says or does something: "1 rank 0 exits -9". What is asked to
    end does so at once; `deaf` members are killed at the end of their time. `sent` are the messages to the agents.
    """

    def __init__(self, folder, events, workers=2, roles=(), absent=(), deaf=(), timeout=30.0, min_processes=None):
        self.logs, self.now, self.sent, self.failed_at = Logs(folder, live=True), 0.0, [], None
        self.names = [*roles, *(f"rank {rank}" for rank in range(workers))]
        split = [event.partition(" ") for event in events]
        self.events = sorted(((float(second), words) for second, _, words in split), key=lambda event: event[0])
        self.deaf, self.silent, self.stopped, self.ends_at = set(deaf), set(absent), set(), {}
        self.interrupts, self.starters = [], {}
        self.decisions = Decisions(self.names, self.send, self.logs, timeout, min_processes, ADVICE)
        for name in self.names:
            if name not in absent:
                self.come(name)

    def come(self, name, host="h1", address="10.0.0.1"):
        if self.decisions.greet(name, host, address, lambda one, other: one == other):
            self.decisions.hear(name, {"started": 100 + self.names.index(name)})

    def send(self, name, **message):
        self.sent.append((self.now, name, message))
        if "end" in message and name not in self.silent:
            at_once = message["ask"] and name not in self.deaf or self.decisions.members[name].return_code is not None
            waits = 0 if at_once else message["end"]
            self.ends_at[name] = min(self.now + waits, self.ends_at.get(name, 1e9))
        elif "signal" in message and name not in self.deaf:
            if message["signal"] == signal.SIGUSR1:
                self.events.append((self.now, f"{name} says {launcher.WRITTEN}"))
            else:
                self.ends_at[name] = self.now + 1  # it saves

    def happen(self, words):
        who, number, what, rest = re.fullmatch(r"([a-z]+) ?(\d*) (\w+) ?(.*)", words).groups()
        name = f"{who} {number}".strip()
        if what == "exits":
            self.decisions.hear(name, {"exited": int(rest)})
            if name in self.ends_at:  # else its agent stays until it is asked to end
                self.decisions.hear(name, {"ended": int(rest)})
        elif what == "disconnects":
            self.silent.add(name)
            self.decisions.disconnect(name)
        elif what == "unties":  # from mpirun
            self.decisions.disconnect_stub(name)
        elif what == "hushes":
            self.silent.add(name)
        elif what == "stops":
            self.stopped.add(name)
        elif what == "says":
            self.decisions.hear(name, {"report": rest})
        elif what == "signalled":
            self.decisions.hear(name, {"signalled": int(rest)})
        elif what == "refused":
            self.decisions.hear(name, {"refused": rest})
            self.decisions.hear(name, {"exited": 127})
        elif what == "prints":
            self.decisions.hear(name, {"stream": 1, "lines": [rest]})
        elif what == "comes":
            self.come(name, *rest.split())
        elif what == "gets":  # the launcher, a signal
            self.interrupts.append(int(rest))
        elif what == "ended":  # a command that starts agents
            self.starters[name] = int(rest)
        elif what == "pauses":  # the launcher
            self.now += float(rest)

    def run(self):
        """Until nothing is left; returns the failure."""
        while not self.decisions.ending.is_over():
            assert self.now < 1000, "the group does not end"
            self.decisions.note_starters(self.starters)
            while self.events and self.events[0][0] <= self.now:
                self.happen(self.events.pop(0)[1])
            self.decisions.look(self.now, self.interrupts)
            if self.decisions.failure and self.failed_at is None:
                self.failed_at = self.now
            for name in self.names:
                member = self.decisions.members[name]
                if self.ends_at.get(name, 1e9) <= self.now and not member.gone:
                    if member.return_code is None:
                        self.decisions.hear(name, {"exited": -9 if name in self.deaf else -15})
                    self.decisions.hear(name, {"ended": member.return_code})
                if name not in self.silent and member.return_code is None:
                    self.decisions.hear(name, {"beat": "T" if name in self.stopped else "S"})
            self.now += TICK
        self.decisions.finish()
        return self.decisions.failure

    def log(self, name):
        path = self.logs.path(name)
        return path.read_text("utf-8") if path.exists() else ""


@pytest.fixture
def group(tmp_path):
    """A function that makes a group and runs it to its end."""
    made = []

    def make(events, **options):
        made.append(Group(tmp_path, events, **options))
        made[-1].run()
        return made[-1]

    yield make
    for one in made:
        one.logs.close()


def all_say(text, ranks=(0, 1)):
    return [f"0 rank {rank} says {text}" for rank in ranks]


ARRIVED, GO_ON, LISTEN = all_say("arrived"), all_say("goes on"), all_say(launcher.LISTENS)
THREE = {"workers": 3}
# events, options, the failed member, the exit code, the message, the second at which it is seen
FAILURES = {
    "killed": (["1 rank 1 exits -9"], {}, "rank 1", 137, r"rank 1 \(process 101 on h1\) was killed by SIGKILL", 1),
    "an exit status": (["1 rank 1 exits 7"], THREE, "rank 1", 7, "ended with status 7; its log is .*rank-1.log", 1),
    "stopped": (["1 rank 1 stops"], {}, "rank 1", 1, "has been stopped .* for 21 s", 22),
    "silent": (["1 rank 1 hushes"], {}, "rank 1", 1, "has been silent for 21 s: its host or agent is stopped", 22),
    "the agent is gone": (["1 rank 1 disconnects"], {}, "rank 1", 1, "was lost: the agent that watches it is gone", 1),
    "never came": ([], {"absent": ["rank 1"]}, "rank 1", 1, "rank 1 never started: nothing came .* within 21 s", 21),
    "refused": (["0 rank 1 refused no such file"], {}, "rank 1", 127, "could not be started on h1: no such file", 0),
    "mpirun has ended": (
        ["1 mpirun ended -6"], {"absent": ["rank 0", "rank 1"]}, "rank 0", 1,
        "rank 0, rank 1 never started: mpirun was killed by SIGABRT", 1,
    ),
    "the shell of one has ended": (
        ["1 rank 1 ended 255", "1 rank 0 ended 0"], {"absent": ["rank 1"]}, "rank 1", 1,
        "^rank 1 never started: rank 1 ended with status 255", 1,
    ),
    "no kvstore": (
        ["1 rank 0 says arrived", "9 rank 2 says arrived"], THREE, "rank 1", 1,
        r"^rank 1 \(process 101 on h1\) did not create its kvstore within 21 s", 22,
    ),
    "two hosts of one name": (
        ["1 rank 1 comes h1 10.0.0.2"], {"absent": ["rank 1"]}, "rank 1", 1,
        "rank 0 and rank 1 are on two hosts, 10.0.0.1 and 10.0.0.2, that call themselves h1 and h1", 1,
    ),
    "the last one does not end": (
        ["1 rank 0 says ends", "2 rank 0 exits 0"], {}, "rank 1", 1,
        r"^rank 1 \(process 101 on h1\) did not end within 300 s after the programs of all had ended", 301,
    ),
    "a server": (["1 server 0 exits 1"], {"roles": ["server 0"]}, "server 0", 1, "ended with status 1", 1),
    "a signal from outside": (["1 rank 1 signalled 15"], {}, "rank 1", 143, "got SIGTERM from outside the group$", 2.5),
    "its process says so": (["1 rank 1 says asked to stop by 15"], {}, "rank 1", 143, "got SIGTERM from outside", 2.5),
    "the other one is to blame": (
        ["1 rank 0 says lost another", "1 rank 0 exits 1", "2 rank 1 exits 3"], {}, "rank 1", 3, "with status 3", 2,
    ),
    "no other one is to blame": (
        ["1 rank 0 says lost another", "1 rank 0 exits 1", "2 rank 1 exits 0"], {}, "rank 0", 1, "with status 1", 2.5,
    ),
    "it was done, the other one fails late": (
        ["1 rank 0 says was done", "1 rank 0 exits 1", "15 rank 1 exits 3"], {}, "rank 1", 3, "with status 3", 15,
    ),
    "others waited for one that runs": (
        ["1 rank 0 says waits for 1", "1 rank 0 says lost another", "1 rank 0 exits 1"], {}, "rank 1", 1,
        r"^rank 1 \(.*\) made no step within the limit of 30 s \(--timeout\): rank 0 waited for it$", 2.5,
    ),
    "it says so later than one that it told": (
        ["1 rank 2 says lost another", "1 rank 2 exits 1", "2 rank 0 says waits for 1", "2 rank 0 exits 3"],
        THREE, "rank 1", 1, "^rank 1 .* made no step .* rank 0 waited for it$", 2.5,
    ),
    "others waited for one that ended well": (
        ["1 rank 1 exits 0", "9 rank 0 says waits for 1", "9 rank 0 exits 1"], {}, "rank 1", 1,
        "^rank 1 .* ended its program with status 0 without leaving the group, .*: rank 0 waited for it$", 10.5,
    ),
    "two wait for each other": (
        ["1 rank 0 says waits for 1", "1 rank 1 says waits for 0", "1 rank 0 exits 1", "2 rank 1 exits 1"], {},
        "rank 0", 1, "ended with status 1", 2.5,
    ),
    "others waited for one that then fails by itself": (
        ["1 rank 0 says waits for 1", "1 rank 0 exits 1", "2 rank 1 exits -11"], {}, "rank 1", 139, "by SIGSEGV", 2,
    ),
    "mpirun is killed": (
        ["0.7 mpirun ended -9", "1 rank 0 exits 195", "1 rank 1 exits 195"], {}, "mpirun", 137,
        "^mpirun, which has started the processes, was killed by SIGKILL$", 1,
    ),
    # where others may go on
    "too few are left": ([*GO_ON, "1 rank 1 exits -9"], {"min_processes": 2}, "rank 1", 137, "SIGKILL", 1),
    "an error": ([*GO_ON, "1 rank 1 exits 1"], {"min_processes": 1}, "rank 1", 1, "ended with status 1", 1),
    "before the first step": (
        [*ARRIVED, "1 rank 1 exits -9"], {"min_processes": 1}, "rank 1", 137, "lost before every process had called", 1,
    ),
    "the other one has not begun and ends well": (
        ["0 rank 1 says goes on", "1 rank 1 exits -9", "2 rank 0 exits 0"], {"min_processes": 1}, "rank 1", 137,
        "it was lost before every process had called gp.prepare or gp.survive", None,
    ),
    "the other one has not begun and ends for the loss": (
        ["0 rank 1 says goes on", "1 rank 1 exits -9", "2 rank 0 says lost another", "2 rank 0 exits 1"],
        {"min_processes": 1}, "rank 1", 137, "it was lost before every process", 2,
    ),
    "the other one has not begun and waits": (
        ["0 rank 1 says goes on", "1 rank 1 exits -9"], {"min_processes": 1}, "rank 1", 137, "it was lost before", 22,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FAILURES)
def test_what_ends_a_group_is_named_in_every_log_with_its_status_and_all_others_are_ended(group, capsys, case):
    events, options, member, code, message, second = FAILURES[case]
    done = group(events, **options)
    failure = done.decisions.failure
    assert (failure.member, failure.exit_code) == (member, code)
    assert re.search(message, failure.message, re.DOTALL), failure.message
    assert second is None or second <= done.failed_at <= second + 0.5
    first = failure.message.splitlines()[0]
    asked = "is asked to stop" in capsys.readouterr().err
    for name in done.names:
        left = done.decisions.members[name]
        assert left.gone or name in done.silent
        has_ended = name != member and any(f"{name} exits" in event for event in events)
        if left.return_code is not None and not asked and not has_ended:
            assert first in done.log(name), name


ONE = "[[1], 4, true, 3, 0.1]"
# events, the ranks that are lost
LOSSES = {
    "killed": (["1 rank 1 exits -9"], {1}),
    "stopped": (["1 rank 1 stops"], {1}),
    "silent": (["1 rank 1 hushes"], {1}),
    "the agent is gone": (["1 rank 1 disconnects"], {1}),
    "its stub under mpirun ends": (["50 rank 1 unties"], {1}),
    "hung": (["1 rank 0 says waits for 1", "1 rank 2 says waits for 0 1"], {1}),
    "the others have missed one that ended well": (["1 rank 1 exits 0", f"1 rank 2 says goes on without {ONE}"], {1}),
    "they say so before it has ended": ([f"1 rank 2 says goes on without {ONE}", "2 rank 1 exits 0"], {1}),
    "one that ended well is waited for": (["1 rank 1 exits 0", "1 rank 0 says waits for 1"], {1}),
    "and so is one that was killed": (["1 rank 1 exits -9", f"2 rank 2 says goes on without {ONE}"], {1}),
    "mpirun is killed as well": (["1 mpirun ended -9", "1 rank 1 exits -9"], {1}),
    "a signal from outside": (["1 rank 1 signalled 15"], {1}),
    "its process says so": (["1 rank 1 says asked to stop by 15", "1 rank 1 exits 143"], {1}),
    "two, one after the other": (["1 rank 1 exits -9", "3 rank 2 exits -9"], {1, 2}),
}


def test_a_process_that_was_asked_to_leave_has_left_and_is_not_lost(tmp_path, capsys):
    made = Group(tmp_path, [], workers=4, min_processes=1)
    members = made.decisions.members
    made.decisions.joins = types.SimpleNamespace(leaving=[members["rank 1"]], hear=lambda *words: None)
    members["rank 1"].return_code = members["rank 2"].return_code = 0
    loss = json.dumps([[1, 2], 5, True, 2, 0.125])
    made.decisions.hear("rank 0", {"report": f"goes on without {loss}"})
    said = "lost in step 6: process 2; left after step 5: process 1; 2 go on after 0.12 s"
    assert said in capsys.readouterr().err
    assert made.decisions.lost() == ["rank 2"]
    made.logs.close()


def test_a_new_process_stays_while_it_is_not_yet_known_why_another_one_has_failed(tmp_path):
    events = [*all_say("goes on", range(3)), "5 rank 1 says lost another", "5 rank 1 exits 1"]
    made = Group(tmp_path, events, workers=3, min_processes=1)
    looks, ends = [], []
    made.decisions.joins = types.SimpleNamespace(
        leaving=[], hear=lambda *words: None, look=lambda *words: looks.append(made.now),
        end=lambda: ends.append(made.now),
    )  # fmt: skip
    made.run()
    assert 0 < len(looks) and looks[-1] < 5 and made.failed_at > 6 and ends[0] == made.failed_at
    made.logs.close()


def test_a_loss_ends_all_where_nobody_would_be_left_but_processes_that_are_about_to_leave(tmp_path):
    made = Group(tmp_path, [], workers=2, min_processes=1)
    members = made.decisions.members
    made.decisions.joins = types.SimpleNamespace(leaving=[members["rank 1"]], hear=lambda *words: None)
    made.decisions._lose(members["rank 0"], "rank 0 was killed by SIGKILL", 137)
    assert made.decisions.failure.exit_code == 137 and not members["rank 0"].is_lost
    made.logs.close()


@pytest.mark.parametrize("case", LOSSES)
def test_the_others_go_on_without_a_process_that_is_lost_and_are_told_its_number(group, case):
    events, lost = LOSSES[case]
    ends = [f"60 rank {rank} exits 0" for rank in {0, 1, 2, 3} - lost]
    done = group([*all_say("goes on", range(4)), *events, *ends], workers=4, min_processes=2)
    assert done.decisions.failure is None
    assert done.decisions.lost() == [f"rank {rank}" for rank in sorted(lost)]
    for number, rank in enumerate(sorted(lost), start=1):
        told = [name for _, name, message in done.sent if message == {"say": f"lost {rank}"}]
        assert {"rank 0", "rank 3"} <= set(told) and f"rank {rank}" not in told
        ended = any(name == f"rank {rank}" and "end" in message for _, name, message in done.sent)
        assert ended == (case != "the agent is gone")
        assert f"{4 - number} of 4 processes go on without it" in done.log("rank 0")


def test_processes_that_are_lost_before_the_launcher_has_heard_the_others_end_nothing(group):
    listen = all_say(launcher.LISTENS, range(4))
    ends = ["20 rank 2 exits 0", "20 rank 3 exits 0"]
    events = [*listen, "1 rank 0 exits -9", "1 rank 1 exits -9", *(f"9 rank {rank} says goes on" for rank in (2, 3))]
    done = group([*events, *ends], workers=4, min_processes=2)
    assert done.decisions.failure is None and done.decisions.lost() == ["rank 0", "rank 1"]
    assert done.log("rank 2").count("2 of 4 processes go on without it") == 2


@pytest.mark.parametrize("asked", [[1, 2], [0], [0, 1, 2]])
def test_signals_from_outside_stop_all_where_too_few_or_not_the_first_would_be_left(group, capsys, asked):
    signalled = [f"1 rank {rank} says asked to stop by 15" for rank in asked]
    done = group([*all_say("goes on", range(3)), *signalled], workers=3, min_processes=2)
    assert done.decisions.failure.exit_code == 143 and done.decisions.lost() == []
    assert "every process is asked to stop, and killed if it has not after 12 s" in capsys.readouterr().err


def test_a_launcher_that_was_stopped_for_a_while_takes_nobody_for_silent(group):
    done = group([*ARRIVED, "5 launcher pauses 900", "940 rank 0 exits 0", "940 rank 1 exits 0"])
    assert done.decisions.failure is None


@pytest.mark.parametrize(("least", "sent"), [(None, 9.0), (1, 1.0)])
def test_the_agent_of_a_process_that_ended_well_stays_until_all_have_where_its_end_would_end_the_others(
    group, least, sent
):
    done = group(["1 rank 1 exits 0", "9 rank 0 exits 0"], min_processes=least)
    assert done.decisions.failure is None
    ends = [second for second, name, message in done.sent if name == "rank 1" and "end" in message]
    assert ends[0] == pytest.approx(sent, abs=0.3)


def test_one_that_ended_well_and_is_not_missed_ends_nothing(group):
    done = group(["1 rank 1 exits 0", "50 rank 0 exits 0"])
    assert done.decisions.failure is None and done.decisions.lost() == []


def test_servers_that_do_not_leave_after_the_workers_are_ended(group):
    done = group(["1 rank 0 exits 0", "1 rank 1 exits 0"], roles=["scheduler", "server 0"])
    assert done.decisions.failure is None
    ends = [(second, message) for second, name, message in done.sent if name == "server 0"]
    assert ends == [(pytest.approx(11.25, abs=0.3), {"end": 3.0, "ask": True})]


SAVED = (2, {"end": 3.0, "ask": False})  # what is sent when the first process has ended
# who does not end by itself, the signals that the launcher gets, what rank 1 is sent and when
TIME_TO_SAVE = {
    "Ctrl-C": ([], ["1 launcher gets 2"], [(1, {"signal": 2}), (1, {"end": 12.0, "ask": False}), SAVED]),
    "SIGTERM": (["rank 1"], ["1 launcher gets 15"], [(1, {"signal": 15}), (1, {"end": 12.0, "ask": False}), SAVED]),
    "Ctrl-C twice": (
        ["rank 0", "rank 1"], ["1 launcher gets 2", "3 launcher gets 2"],
        [(1, {"signal": 2}), (1, {"end": 12.0, "ask": False}), (3, {"end": 0.0, "ask": True})],
    ),
    "SIGTERM twice": (
        ["rank 0", "rank 1"], ["1 launcher gets 15", "3 launcher gets 15"],
        [(1, {"signal": 15}), (1, {"end": 12.0, "ask": False})],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TIME_TO_SAVE)
def test_who_asks_the_launcher_to_stop_gives_processes_the_time_to_save(group, capsys, case):
    deaf, events, sent = TIME_TO_SAVE[case]
    done = group(events, deaf=deaf)
    assert done.decisions.failure.member == "" and done.decisions.failure.exit_code == 128 + int(events[0].split()[-1])
    got = [(second, message) for second, name, message in done.sent if name == "rank 1"][: len(sent)]
    assert [message for _, message in got] == [message for _, message in sent]
    assert [second for second, _ in got] == pytest.approx([second for second, _ in sent], abs=0.3)
    assert all(message["end"] > 0 for _, _, message in done.sent if "end" in message) or case == "Ctrl-C twice"
    assert ("Ctrl-C once more ends them at once" in capsys.readouterr().err) == ("Ctrl-C" in case)


def test_after_sighup_nothing_is_written_to_the_terminal(group, capsys):
    done = group(["1 launcher gets 1", "1.5 rank 0 prints too late"])
    assert done.decisions.failure.exit_code == 129 and "too late" in done.log("rank 0")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("deaf", "stops"), [([], []), (["rank 0"], []), (["rank 0"], ["0.5 rank 0 stops"])])
def test_processes_write_their_flight_recorders_before_they_are_ended_for_another_one(group, capsys, deaf, stops):
    done = group([*LISTEN, *stops, "1 rank 1 exits -9", f"1 rank 0 prints {launcher.SAID}a file"], deaf=deaf)
    assert [message for _, name, message in done.sent if name == "rank 0"] == [
        *[{"signal": signal.SIGUSR1}] * (not stops), {"end": 3.0, "ask": True},
    ]  # fmt: skip
    (first, _, _), *_, (second, _, _) = [one for one in done.sent if one[2] != {"signal": 2}]
    assert second - first == pytest.approx(3.0 if deaf and not stops else 0.0, abs=0.3)
    assert "a file" in done.log("rank 0") and "a file" not in capsys.readouterr().out


@pytest.mark.parametrize("deaf", [[], ["rank 0"]])
def test_what_does_not_answer_at_all_is_not_waited_for_longer_than_its_grace(group, deaf):
    done = group(["1 rank 0 hushes", "1 rank 1 exits -9"], deaf=deaf)
    assert done.now < 1 + 3 + 1.5 + 1


def test_only_a_lost_process_is_answered_with_the_advice(group, capsys):
    for event, advised in (("1 rank 1 exits -9", True), ("1 rank 1 exits 1", False)):
        group([event])
        assert (ADVICE in capsys.readouterr().err) == advised


def test_what_a_process_has_said_is_in_the_error_where_no_view_is_live(group, monkeypatch, tmp_path):
    monkeypatch.setattr(Logs, "__init__", lambda self, folder, live: vars(self).update(
        folder=folder, live=False, announces=True, _files={}, _bar=""))  # fmt: skip
    done = group(["0.5 rank 1 prints no space left", "1 rank 1 exits 1"])
    assert done.decisions.failure.message.endswith("rank-1.log\n    no space left")


def test_an_agent_that_comes_after_the_end_is_sent_away(group):
    done = group(["1 rank 0 exits -9", "2 rank 1 comes h1 10.0.0.1"], absent=["rank 1"], deaf=["rank 0"])
    assert done.decisions.failure.member == "rank 0"
    assert done.decisions.members["rank 1"].process == 0


def test_the_cause_of_an_end_is_also_in_the_logs_of_processes_that_have_ended_by_then():
    """As one does that hears of the loss by MPI, and ends by an error of its own, before the launcher hears of it."""
    written = []
    codes = {"rank 0": 1, "rank 1": -9, "rank 2": None}
    members = {
        name: types.SimpleNamespace(name=name, return_code=code, records=False, stopped_since=None, has_come=False)
        for name, code in codes.items()
    }
    logs = types.SimpleNamespace(say=lambda text, names=(): written.append((text, sorted(names))))
    Ending(members, lambda *_, **__: None, logs, 10.0).fail("rank 1", "rank 1 was killed", 137)
    assert written[0] == ("error: rank 1 was killed\n    rank 2 cannot go on and will be ended", sorted(codes))
