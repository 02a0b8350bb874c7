"""Hypothesis draws random trainings; what contradicts itself, or MXNet cannot do on one device, is not drawn."""

import hypothesis
from hypothesis import strategies as st
from trainings_case import Case, Step

EVENTS = ["", "", "", "", "freeze", "thaw", "set_data", "in_place", "learning_rate", "unused", "left_out"]
EVENTS += ["checkpoint", "states", "move"]


def _choose(draw, *values):
    return draw(st.sampled_from(values))


def _often(draw, often=1, of=4):
    """True in so many of so many cases; false is the simpler one."""
    return draw(st.integers(1, of)) > of - often


def examine(seed, check, shrink=True, **which):
    """Hand the case of this seed to ``check(case)``; where that raises, also smaller ones, and the smallest one last.

    Hypothesis begins with the simplest case, which is not handed over as the first one.
    """
    phases = [hypothesis.Phase.generate, *([hypothesis.Phase.shrink] if shrink else [])]
    has_begun = False

    def run(case):
        nonlocal has_begun
        if has_begun:
            check(case)
        has_begun = True

    hypothesis.settings(
        max_examples=2, phases=phases, deadline=None, database=None, verbosity=hypothesis.Verbosity.quiet,
        report_multiple_bugs=False, suppress_health_check=list(hypothesis.HealthCheck),
    )(hypothesis.seed(seed)(hypothesis.given(cases(**which))(run)))()  # fmt: skip


@st.composite
def cases(draw, ways=("DataParallel", "loop", "prepare", "Module", "Pipeline"), processes=(1, 1, 1, 2)):
    """A training in one of these ways over one of these numbers of processes."""
    draw(st.booleans())  # Hypothesis draws the first value of the second example unlike that of the first one
    way, num_processes = _choose(draw, *ways), _choose(draw, *processes)
    case = {
        "way": way, "processes": num_processes, "seed": draw(st.integers(0, 9999)),
        "devices": _choose(draw, 2, 3, 1) if num_processes == 1 else _choose(draw, 1, 2),
    }  # fmt: skip
    case.update(draw(_nets(way)))
    if way == "Module":  # in which batch norm is that of a device
        case["batch_norm"] = case["batch_norm"] and case["devices"] * num_processes == 1
    case.update(draw(_losses(way)))
    case.update(draw(_updates(way, case)))
    case["numpy_mode"] = _knows_numpy(case) and _often(draw, 2)
    if way == "prepare":
        case.update(draw(_loaders(case)))
    if way == "Pipeline":
        case.update(draw(_stages(case)))
    case["steps"] = draw(_steps(case))
    return Case(**case)


def _knows_numpy(case):
    """Whether MXNet can do it in NumPy mode, and what is written here."""
    is_old = case["way"] == "Module" or case["sparse"] or case["net"] == "lstm" or case["loss"] in ("parts", "pairs")
    clips = _is_own(case["way"]) and case.get("clip_global_norm")  # by MXNet's function, which knows old arrays alone
    return not (is_old or clips or case["time_major"] or case.get("add") or case.get("backward") == "autograd.grad")


def _is_own(way):
    """Whether the loop is one's own, of MXNet's classes alone."""
    return way in ("loop", "Module")


@st.composite
def _nets(draw, way):
    net = _choose(draw, "dense", "conv", "embedding", "lstm")
    is_flat, dtype = net in ("dense", "conv"), _choose(draw, "float64", "float32")
    found = {
        "net": net, "dtype": dtype, "width": _choose(draw, 5, 5, 5, 40),
        "batch_norm": _often(draw), "tied": _often(draw), "branches": _often(draw),
        "sparse": net in ("embedding", "lstm") and _often(draw), "deferred": _often(draw),
        "activation": _choose(draw, "tanh", "relu") if dtype == "float64" else "tanh",
        "time_major": not is_flat and _often(draw, 2),
        "hybridize": _choose(draw, "", "graph", "static_alloc", "static_shape"),
        "fixed": _choose(draw, "", "", "", "null", "lr_mult", "wd_mult"), "which": draw(st.integers(0, 7)),
        "form": _choose(draw, "arrays", "arrays", "numpy", "list") if is_flat else "arrays",
    }  # fmt: skip
    # A recomputed block has no layers that exchange, and dense gradients.
    found["recompute"] = not found["batch_norm"] and not found["sparse"] and _often(draw)
    if way == "Module":
        found.update(branches=False, sparse=False, deferred=False, hybridize="", recompute=False)
        return found
    if way == "Pipeline":
        found.update(branches=False, sparse=False, recompute=_often(draw, 2))
        return found
    found["convert"] = not _is_own(way) and bool(found["hybridize"]) and _often(draw)
    return found


@st.composite
def _losses(draw, way):
    of_batch = [] if _is_own(way) else ["parts"] if way == "Pipeline" else ["parts", "pairs"]
    loss = _choose(draw, "l2", "ce", "weighted", *of_batch)
    has_one = not _is_own(way) and loss not in ("parts", "pairs")
    reduction = _choose(draw, "", "", "mean", "sum") if has_one else ""
    return {"loss": loss, "reduction": reduction}


@st.composite
def _updates(draw, way, case):
    only_float32 = ["adagrad", "rmsprop"] if case["dtype"] == "float32" else []  # their state has float32 alone
    optimizer = _choose(draw, "sgd", "momentum", "nag", "adam", "adamw", *only_float32)
    processes = case["processes"]
    found = {
        "optimizer": optimizer, "schedule": _choose(draw, "", "", "factor", "poly"),
        "wd": _choose(draw, 0.0, 0.01), "clip_gradient": _choose(draw, None, None, None, 0.05),
        "store": "mpi" if processes > 1 else _choose(draw, "device", "local", "none"),
    }  # fmt: skip
    if case["sparse"] and optimizer == "adagrad":
        found["wd"] = 0.0  # MXNet refuses another one
    if way == "Module":
        return {**found, "store": found["store"] if found["store"] != "none" else "device"}
    if case.get("loss") not in ("parts", "pairs"):
        found["accumulate"] = _choose(draw, 1, 1, 2, 3)
    if way == "loop":
        found["sums"] = _choose(draw, "step", "allreduce_grads", "gp.allreduce")
        if processes > 1 and found["sums"] == "gp.allreduce":
            found["sums"] = "allreduce_grads"
        if found["store"] == "none":
            found["sums"] = "gp.allreduce"
        if found["sums"] != "step":
            found["update_on_kvstore"] = False if found["store"] != "none" else None
            # All that gluon.utils.clip_global_norm takes; and it counts gradients that a step leaves as they were.
            if not case["sparse"] and case["dtype"] == "float32" and not case["branches"]:
                found["clip_global_norm"] = _choose(draw, None, None, 0.1)
        elif processes == 1 and found["store"] != "none":
            # On one device MXNet makes no store.
            found["update_on_kvstore"] = _choose(draw, None, False, *([True] if case["devices"] > 1 else []))
        found["add"] = found["accumulate"] > 1 or _often(draw)
        found["accumulate"] = 1 if case["sparse"] else found["accumulate"]
        found["add"] = found["add"] and not case["sparse"]  # MXNet adds to no row_sparse gradients
        dense = not case["sparse"] and not found["add"] and not case["recompute"]
        again = not found["add"] and not case["batch_norm"]  # it would move the running statistics
        found["backward"] = _choose(
            draw, "joint", "each", *(["autograd.grad"] if dense else []), *(["again"] if again else [])
        )
        # A store that updates has weights of its own, which do not follow those of the devices.
        is_alone = found["store"] == "none" or found.get("update_on_kvstore")
        found["two_trainers"] = not is_alone and not found["schedule"] and _often(draw)
        return found
    found["clip_global_norm"] = _choose(draw, None, None, 0.1)
    found["scaled"] = _often(draw)
    if way == "Pipeline":
        return found
    found["shard_optimizer"] = not case["sparse"] and _often(draw)
    found["average"] = _often(draw)
    if processes > 1 and not case["sparse"] and not found["shard_optimizer"]:
        # In 16 bits a scaled gradient overflows, and the step is left out.
        found["hook"] = _choose(draw, "", "", "exact", *([] if found["scaled"] else ["float16"]))
    return found


@st.composite
def _stages(draw, case):
    numbers = [2, 1] if case["tied"] or case["form"] == "list" else [2, 1, 3]
    return {
        "stages": _choose(draw, *numbers), "micro_batches": draw(st.integers(1, 4)),
        "order": _choose(draw, "1f1b", "gpipe"), "devices": min(case["devices"], 2),
    }  # fmt: skip


@st.composite
def _loaders(draw, case):
    batch_size, samples = draw(st.integers(1, 6)), draw(st.integers(1, 12))
    time_major = case["time_major"]
    last_batch = _choose(draw, "keep", "keep", "discard", *(["rollover"] if case["processes"] == 1 else []))
    shuffle = last_batch != "rollover" and _often(draw, 2)
    if last_batch != "keep":  # an epoch without a batch is refused
        samples = max(samples, batch_size)
    scores = {"l2": ["mse", "rmse", "mae", "largest"], "ce": ["acc"] if case.get("hook") != "float16" else []}
    is_of_batch = case["loss"] in ("parts", "pairs")
    scores = ["", "predict"] if is_of_batch else ["", "loss", "predict", *scores.get(case["loss"], [])]
    return {
        "score": _choose(draw, *scores),
        # A process without a sample in the first batch does not know the shapes.
        "deferred": case["deferred"] and case["processes"] == 1,
        "samples": samples, "batch_size": batch_size, "epochs": draw(st.integers(1, 2)), "shuffle": shuffle,
        "last_batch": last_batch, "batchify": "stack" if time_major else _choose(draw, "", "stack", "extra"),
        "form": "arrays" if case["form"] == "numpy" else case["form"],
    }  # fmt: skip


@st.composite
def _steps(draw, case):
    num = draw(st.integers(1, 6))
    if case["way"] == "Module":
        sizes = (draw(st.integers(case["devices"], 6)),) * case["processes"]
        events = [_choose(draw, "", "", "set_data", "learning_rate") if number else "" for number in range(num)]
        return tuple(Step(sizes, before=one if fits(one, case, sizes) else "") for one in events)
    return tuple(draw(_step(case, number)) for number in range(num))


@st.composite
def _step(draw, case, number):
    sizes = (0,) * case["processes"]
    if not case.get("samples"):
        # Layers that meet other processes need all of them in a loop of one's own; unknown shapes need a sample.
        needs_all = (case["way"] == "loop" and case["batch_norm"]) or (case["deferred"] and not number)
        least = int(needs_all or case["processes"] == 1)
        sizes = tuple(draw(st.integers(least, 5)) for _ in sizes)
        if case["way"] == "Pipeline":  # in which each micro-batch has a sample
            sizes = tuple(size and size - 1 + case["devices"] * case["micro_batches"] for size in sizes)
        if not sum(sizes):
            sizes = (case["devices"] * case.get("micro_batches", 1), *sizes[1:])
    # Of a layer that the first batch does not reach, MXNet does not know the shape.
    is_whole = not case["branches"] or (case["deferred"] and not number)
    used = (0, 1) if is_whole else _choose(draw, (0, 1), (0, 1), (0,), (1,))
    before = _choose(draw, *EVENTS) if number and not number % case.get("accumulate", 1) else ""
    return Step(sizes, used, before if fits(before, case, sizes) else "")


def fits(event, case, sizes):
    """Whether an event makes sense in a case, before a step in which the processes have so many samples."""
    way, accumulates = case["way"], case.get("accumulate", 1) > 1
    # It adds to the gradients of the step; layers that meet other processes would need all of them.
    may_run = not accumulates and not case.get("add") and not (case["batch_norm"] and case["processes"] > 1)
    can_freeze = case["fixed"] != "null" and not (way == "prepare" and accumulates)  # its epochs end in between
    return {
        "learning_rate": not case["schedule"],
        "move": way in ("DataParallel", "loop")
        and not any(map(case.get, ("update_on_kvstore", "shard_optimizer", "average"))),
        "in_place": not case.get("update_on_kvstore"),
        # Whoever marks gradients by hand has to take the marks of other passes away. In a loop of one's own the step
        # uses a process's last backward pass, which without samples is this one.
        "unused": may_run
        and way not in ("prepare", "Pipeline")
        and case.get("backward") != "autograd.grad"
        and (way != "loop" or all(sizes)),
        "left_out": may_run and case.get("sums") == "allreduce_grads",
        "checkpoint": way in ("DataParallel", "loop", "Pipeline") and not case.get("two_trainers"),
        "states": way in ("DataParallel", "loop")
        and not any(map(case.get, ("two_trainers", "shard_optimizer", "average"))),
        "freeze": can_freeze,
        "thaw": can_freeze,
    }.get(event, True)
