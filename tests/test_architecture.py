"""Layers of the package, read from its imports: they point down only, and modules of one layer are independent."""

import ast
import graphlib
import inspect
import operator
import re
import textwrap
from pathlib import Path

import pytest

import gluon_parallel as gp
from gluon_parallel import patches
from gluon_parallel.mxnet.compat import mx
from gluon_parallel.native.records import C
from mxnet.contrib.amp.loss_scaler import LossScaler

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "gluon_parallel"
PAGE = (ROOT / "docs" / "explanation" / "architecture.md").read_text("utf-8")

# From the lowest layer to the highest. In the lowest one, modules may use those before them.
LAYERS = [
    ["forks", "leftovers", "errors", "bounds", "device_names", "environment", "launcher"]
    + ["store_table", "native", "cores"]
    + ["mxnet/cuda", "mxnet/compat", "mxnet/attached"]
    + [f"mxnet/{name}" for name in ("library", "arrays", "parameters", "blocks", "optimizers", "trainers", "modules")]
    + [
        f"mxnet/{name}"
        for name in ("loss_scaler", "loaders", "metrics", "profiler", "device_threads", "engine", "last_error")
    ],
    ["devices", "split", "allreduce", "archive", "sample_loss"],
    ["kvstore", "loss_checks"],
    ["launch_engines", "communication_hooks", "gather"],
    ["nn", "reduce"],
    ["step", "asynchronous", "metrics"],
    ["pipeline", "survive"],
    ["training", "models", "datasets"],
    ["launch"],
    ["commands"],
    ["patches", "__main__"],
]
LAYER = {module: number for number, modules in enumerate(LAYERS) for module in modules}
PUBLIC_API = "__init__"  # it imports every module, and no module imports it
ROOMS = ["mxnet"]  # folders whose folders are modules of their own
# {a module: its layers, from the lowest}, of files or folders, whose imports point down in the same way.
INSIDE = {
    "step": [
        ["checks", "custom_split", "label_checks", "losses", "module_loops", "precision", "sampler", "trainer_loops"],
        ["first_step", "loss_over_batch"],
        ["weight_checks"],
        ["training_step"],
        ["training"],
        ["data_parallel"],
    ],
    "reduce": [["nag", "step_header", "update_order"], ["reducer"], ["hooked_sum", "shards"]],
    "kvstore": [
        ["protocols", "reserved_keys"],
        ["flight_recorder", "state", "together"],
        ["work"],
        ["gathering"],
        ["handshake"],
        ["contract"],
        ["base", "exchange", "process_rows", "separate_training", "trainer_parameters"],
        ["horovod", "mpi", "servers"],
        ["factory"],
        ["clients", "collective"],
        ["groups"],
    ],
    "kvstore/mpi": [
        ["pmix", "processor_time", "transport"],
        ["agreement"],
        ["lost_workers", "operations"],
        ["progress_engine", "shared_memory/rows"],
        ["python_sums"],
        ["shared_memory/sums"],
        ["plan", "shared_memory/memory"],
        ["shared_memory/shards", "startup"],
        ["regrouping"],
        ["store"],
    ],
}


def modules():
    """(module, file) of every Python file of the package; a folder is one module, whatever its files."""
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(PACKAGE).with_suffix("").parts
        if parts[0] not in ROOMS:
            yield parts[0], file
        elif parts[1] != "__init__":
            yield "/".join(parts[:2]), file


def imported_modules(tree, package):
    """(module, line) for every import from this package in `tree`, a file of `package` (a tuple of names).

    Example:
        >>> list(imported_modules(ast.parse("from .mxnet.compat import mx"), ("gluon_parallel",)))
        [('mxnet/compat', 1)]
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _module_of(tuple(alias.name.split(".")), node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = base + tuple((node.module or "").split(".")) if node.module else base
            if module == ("gluon_parallel",) or module[1:] in [(room,) for room in ROOMS]:
                for alias in node.names:
                    if alias.name != "__version__":  # which is set before anything is imported
                        yield from _module_of((*module, alias.name), node.lineno)
            else:
                yield from _module_of(module, node.lineno)


def _module_of(module, line):
    if module and module[0] == "gluon_parallel":
        in_room = len(module) > 2 and module[1] in ROOMS
        yield ("/".join(module[1:3]) if in_room else module[1] if len(module) > 1 else PUBLIC_API), line


def may_import(module, other):
    """Whether `module` may import `other`, by the table of layers."""
    if module == other or module == PUBLIC_API:
        return True
    if other == PUBLIC_API:
        return False
    if LAYER[module] == LAYER[other] == 0:
        return LAYERS[0].index(other) < LAYERS[0].index(module)
    return LAYER[other] < LAYER[module]


def forbidden_imports(module, source, package=("gluon_parallel",)):
    """(line, module that may not be imported here) for each such import in `source`."""
    tree = ast.parse(source)
    return [(line, other) for other, line in imported_modules(tree, package) if not may_import(module, other)]


def test_every_module_has_its_layer():
    assert {module for module, _ in modules()} - {PUBLIC_API} == set(LAYER), "see LAYERS and the page architecture.md"


def test_the_page_shows_the_same_layers():
    shown = [[] for _ in LAYERS]
    for number, names in re.findall(r"^\| (\d+) \| (`.*?`) \|", PAGE, re.MULTILINE):
        shown[int(number) - 1] += re.findall(r"`([\w/]+)`", names)
    assert shown[0] == LAYERS[0], "in the lowest layer the order counts"
    assert list(map(sorted, shown)) == list(map(sorted, LAYERS))


def test_the_files_that_the_page_names_exist():
    named = re.findall(r"`([\w/]+\.py|[a-z_]+/[a-z_/]+)`", PAGE)
    assert named
    assert not [
        name
        for name in named
        if not any(
            (folder / f"{name}{end}").exists()
            for folder in (PACKAGE, ROOT, *map(PACKAGE.joinpath, INSIDE))
            for end in ("", ".py")
        )
    ]


def replaced_in(source):
    """The functions of MXNet that a file's statements replace, without what leads to MXNet.

    Example:
        >>> replaced_in("mx.nd.f = g; self.x = 1; _LIB.MXSet = h; replace_c_function('MXRun', i); setattr(mx, 'f', g)")
        ['nd.f', 'MXSet', 'MXRun', 'setattr']
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign):
            names = [ast.unparse(target).split(".") for target in node.targets if isinstance(target, ast.Attribute)]
            found += [".".join(rest) for root, *rest in names if root in ("mx", "_LIB", "amp_module")]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "replace_c_function":
            found.append(node.args[0].value)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr" and "mx" in ast.unparse(node.args[0]):
            found.append("setattr")
    return found


def owner_of(path):
    """The module or class of MXNet that holds what `path` names, such as ``nd`` for ``nd.zeros``."""
    return operator.attrgetter(path.rpartition(".")[0])(mx)


def test_the_page_lists_every_function_of_mxnet_that_is_replaced():
    section = PAGE.partition("## Replaced functions of MXNet")[2].partition("\n## ")[0]
    rows = [line.split(" | ")[:2] for line in section.splitlines() if line.startswith("| `")]
    shown = {(name, by.strip("`")) for names, by in rows for name in re.findall(r"`([\w.]+)`", names)}
    found = set()
    for module, file in modules():
        if module not in ("mxnet/compat", "patches"):
            found.update((name, str(file.relative_to(PACKAGE))) for name in replaced_in(file.read_text("utf-8")))
    for patch in (*patches.REPLACEMENTS, *patches.WRAPPERS, *patches.WRAPPERS_IN_GROUPS):
        function = getattr(patch.ours, "func", getattr(patch.ours, "fset", patch.ours))  # of a property
        [name] = {path for path, _ in shown if path.endswith(f".{patch.name}") and owner_of(path) is patch.owner}
        found.add((name, function.__module__.partition(".")[2].replace(".", "/") + ".py"))
    assert found == {(name, by) for name, by in shown if not by.startswith("mxnet/compat")}


def c_functions_in(source):
    """The names of a Python file's C functions, made by ``ctypes``, and of those that it gives to the C library.

    Example:
        >>> c_functions_in("T = CFUNCTYPE(None); f = T(g); i = cast(CDLL(None).j); native.provide('h', k)")
        ['f', 'i', 'h']
    """
    nodes = list(ast.walk(ast.parse(source)))
    makers, names = {"CFUNCTYPE", "PYFUNCTYPE"}, []
    for node in nodes:  # types of functions
        if isinstance(node, ast.Assign) and re.match(r"(ctypes\.)?\w+FUNCTYPE\(", ast.unparse(node.value)):
            makers |= set() if isinstance(node.value.func, ast.Call) else {node.targets[0].id}
    for node in nodes:
        made, name = "", ""
        if isinstance(node, ast.FunctionDef):
            made, name = " ".join(map(ast.unparse, node.decorator_list)), node.name
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            made, name = ast.unparse(node.value.func), ast.unparse(node.targets[0]).split(".")[-1]
            made += " CFUNCTYPE" * bool(re.match(r"(ctypes\.)?cast\((ctypes\.)?CDLL", ast.unparse(node.value)))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("provide"):
            made, name = "CFUNCTYPE", node.args[0].value
        if makers & set(re.findall(r"\w+", made)) and name not in makers:
            names.append(name)
    return names


def test_the_page_lists_every_c_function_that_others_are_given():
    section = PAGE.partition("## C functions that others call")[2].partition("\n## ")[0]
    shown = set()
    for line in section.splitlines():
        if line.startswith("| `"):
            names, file = line.split(" | ")[:2]
            shown |= {(file.strip("`"), name) for name in re.findall(r"`(\w+)`", names)}
    found = {(str(file.relative_to(PACKAGE)), name) for module, file in modules() if module != "native"
             for name in c_functions_in(file.read_text("utf-8"))}  # fmt: skip
    for file in PACKAGE.glob("native/*.c"):
        exported = re.findall(r"^EXPORT [\w* ]*?(\w+)\(", file.read_text("utf-8"), re.MULTILINE)
        found |= {(str(file.relative_to(PACKAGE)), name) for name in exported}
    assert found == shown
    provided = {name for name, _ in C.External._fields_ if not name.startswith("MX")}
    assert provided <= {name for _, name in shown}


def test_each_reserved_key_names_the_module_that_uses_it():
    lines = (PACKAGE / "kvstore" / "reserved_keys.py").read_text("utf-8").splitlines()
    named = [match.groups() for line in lines if (match := re.match(r"(\w+) = .+  # (\w+)\.(\w+)", line))]
    assert named
    for key, folder, module in named:
        assert key in (PACKAGE / folder / f"{module}.py").read_text("utf-8")


def test_dir_shows_the_public_names_and_nothing_else():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    public = {name.asname for node in tree.body if isinstance(node, ast.ImportFrom) for name in node.names}
    assert set(dir(gp)) == {name for name in public if not name.startswith("_")}


def files_imported_by(file, names):
    """The files of the package that a file imports, for its types too; `names` are all files by module name."""
    own = file.relative_to(ROOT).with_suffix("").parts
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            module = (*own[: len(own) - node.level], *(node.module or "").split("."))
            for alias in (one for one in node.names if one.name != "__version__"):  # see `imported_modules`
                name = ".".join(filter(None, module))
                found = f"{name}.{alias.name}", f"{name}.{alias.name}.__init__", name, f"{name}.__init__"
                yield next(names[one] for one in found if one in names)


def test_no_files_import_each_other_in_circles():
    names = {".".join(file.relative_to(ROOT).with_suffix("").parts): file for _, file in modules()}
    graph = {file: {*files_imported_by(file, names)} - {file} for _, file in modules()}
    graphlib.TopologicalSorter(graph).prepare()  # its CycleError has the files


def place_inside(module, file):
    """What a file is in a module's own layers: its name there, or the folder that has it; "" for ``__init__``."""
    name = str(file.relative_to(PACKAGE / module).with_suffix("")).removesuffix(PUBLIC_API).rstrip("/")
    named = [place for layer in INSIDE[module] for place in layer]
    return next((place for place in named if name == place or name.startswith(f"{place}/")), name)


@pytest.mark.parametrize("module", INSIDE)
def test_inside_of_a_module_too_imports_point_down(module):
    level = {place: number for number, layer in enumerate(INSIDE[module]) for place in layer}
    files = {file: place_inside(module, file) for file in (PACKAGE / module).rglob("*.py")}
    folders = {place.rpartition("/")[0] for place in level}
    assert {*files.values()} - folders == {*level} - folders, "see INSIDE and the page architecture.md"
    names = {".".join(file.relative_to(ROOT).with_suffix("").parts): file for _, file in modules()}
    for file, place in files.items():
        for other in map(files.get, files_imported_by(file, names)):
            if place in level and other is not None and other != place:
                assert level.get(other, -1) < level[place], f"{file.relative_to(ROOT)} may not import {other}"


def test_the_page_shows_the_layers_inside_of_modules():
    section = PAGE.partition("### Inside of")[2].partition("\n## ")[0]
    shown = {module: [] for module in INSIDE}
    for module, names in re.findall(r"^\| `([\w/]+)` \| \d+ \| (.*?) \|$", section, re.MULTILINE):
        shown[module].insert(0, sorted(re.findall(r"`([\w/]+)`", names)))
    assert shown == {module: [sorted(layer) for layer in layers] for module, layers in INSIDE.items()}


@pytest.mark.parametrize("module", [*LAYER, PUBLIC_API])
def test_imports_point_down_and_modules_of_one_layer_do_not_import_each_other(module):
    for owner, file in modules():
        if owner == module:
            package = ("gluon_parallel", *file.relative_to(PACKAGE).parts[:-1])
            for line, other in forbidden_imports(module, file.read_text("utf-8"), package):
                pytest.fail(f"{file.relative_to(ROOT)}:{line}: {module} may not import {other}")


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("split", "from .step import DataParallel"),
        ("split", "from . import allreduce"),
        ("split", "def f():\n    from gluon_parallel.allreduce import allreduce"),
        ("mxnet/compat", "import gluon_parallel.mxnet.engine"),
        ("models", "import gluon_parallel as gp"),
        ("models", "from .datasets.digits import load"),
    ],
)
def test_the_check_sees_an_import_of_a_higher_layer_of_the_same_one_or_of_the_public_api(module, source):
    assert forbidden_imports(module, source)


@pytest.mark.parametrize(
    ("module", "source", "package"),
    [
        ("split", "from .mxnet.compat import mx\nfrom .errors import BatchMismatch", ("gluon_parallel",)),
        ("mxnet/engine", "from ..compat import mx", ("gluon_parallel", "mxnet", "engine")),
        ("nn", "from ..allreduce import allreduce\nfrom .converters import convert", ("gluon_parallel", "nn")),
        ("split", "import numpy as np\nfrom mxnet import nd", ("gluon_parallel",)),
    ],
)
def test_the_check_lets_an_import_of_a_lower_layer_or_of_the_same_module_pass(module, source, package):
    assert not forbidden_imports(module, source, package)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_file_opens_with_the_line_that_says_what_it_is(path):
    docstring = ast.get_docstring(ast.parse(path.read_text("utf-8")))
    assert docstring, "the first line of a file says what it is"
    assert docstring.splitlines()[0].strip(), "the docstring's first line is the one that says it"


def imports_of_ours(source):
    """The import statements in `source` that reach into this package, as text."""
    for node in ast.walk(ast.parse(source)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        if any(name.split(".")[0] == "gluon_parallel" for name in names):
            yield ast.unparse(node)


@pytest.mark.parametrize(
    "path", sorted([*ROOT.glob("scripts/**/*.py"), *ROOT.glob("docs/tutorials/*.py")]), ids=lambda path: path.name
)
def test_scripts_and_tutorials_use_only_the_public_api(path):
    assert set(imports_of_ours(path.read_text("utf-8"))) <= {"import gluon_parallel as gp"}


# Classes of MXNet whose private attributes are used below mxnet/ alone.
CLASSES = [
    mx.gluon.Trainer, mx.gluon.Parameter, mx.gluon.Block, mx.gluon.HybridBlock, mx.gluon.SymbolBlock, mx.nd.NDArray,
    mx.nd._internal.CachedOp, mx.kv.KVStore, mx.mod.Module, mx.optimizer.Optimizer, mx.optimizer.Updater,
    mx.metric.EvalMetric, mx.metric.MCC, mx.gluon.data.DataLoader, mx.gluon.data.BatchSampler,
    mx.gluon.data.dataset._SampledDataset, mx.gluon.loss.SoftmaxCrossEntropyLoss, mx.gluon.nn.BatchNorm,
    LossScaler,
]  # fmt: skip
# Of modules of MXNet, or set by their functions.
MORE_ATTRIBUTES = {
    "_amp_loss_scaler", "_amp_original_scale", "_amp_initialized", "_flatten", "_regroup", "_LIB", "check_call"
}  # fmt: skip
# {file: private attributes in it of objects of ours, or of GluonCV, that are called as some of MXNet's}
SAME_NAMES = {
    "commands/profiling/observers.py": {"_trainer"},
    "models/faster_rcnn/targets.py": {"_sampler"},
    "models/faster_rcnn/training.py": {"_batch_size"},
}


def private_attributes_of(classes):
    """The private names that the code of these classes defines or sets.

    Example:
        >>> sorted(private_attributes_of([mx.gluon.data.BatchSampler]))
        ['_batch_size', '_last_batch', '_prev', '_sampler']
    """
    found = set()
    for kind in classes:
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(kind)))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.FunctionDef):
                found.add(node.name)
    return {name for name in found if re.match("_[^_]", name)}


def private_uses(source, names):
    """(line, code) of each use of these attributes but by a class's own methods, by ``self`` or ``cls``.

    Functions of MXNet that the page lists as replaced may be read and replaced where it says so, by their whole path.

    Example:
        >>> private_uses("class A:\\n    def f(self, b):\\n        self._x = b._x, getattr(b, '_x')", {"_x"})
        [(3, 'b._x'), (3, "getattr(b, '_x')")]
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        is_text = isinstance(node, ast.Call) and len(node.args) > 1 and isinstance(node.args[1], ast.Constant)
        is_text = is_text and ast.unparse(node.func) in ("getattr", "setattr", "hasattr", "delattr", "replace_method")
        name = node.args[1].value if is_text else node.attr if isinstance(node, ast.Attribute) else None
        if name in names and ast.unparse(node.args[0] if is_text else node.value) not in ("self", "cls"):
            found.append((node.lineno, ast.unparse(node)))
    return found


OF_MXNET = private_attributes_of(CLASSES) | MORE_ATTRIBUTES


def test_private_attributes_of_mxnet_are_used_below_the_room_mxnet_alone():
    replaced = {path.rpartition(".")[2] for path in re.findall(r"`([\w.]+)`", PAGE)}
    found = {}
    for module, file in modules():
        if module.partition("/")[0] not in ROOMS:
            name = str(file.relative_to(PACKAGE))
            for line, code in private_uses(file.read_text("utf-8"), OF_MXNET - SAME_NAMES.get(name, set())):
                if not (code.startswith("mx.") and code.rpartition(".")[2] in replaced):
                    found[f"{name}:{line}"] = code
    assert not found, "write a function with a name for it, in gluon_parallel/mxnet"


def test_names_that_only_look_like_mxnets_are_still_there():
    for name, attributes in SAME_NAMES.items():
        assert {code.rpartition(".")[2] for _, code in private_uses((PACKAGE / name).read_text(), attributes)}, name


# What a name in the package's code stands for an object of, if it is not ours; `Attached` is for what belongs to these.
FOREIGN = re.compile(r"(^|\.)_?(trainer|parameter|block|net|layer|array|optimizer|updater|module|executor|kv)$")
PUBLIC = {name for kind in (*CLASSES, mx.optimizer.LARS) for name in vars(kind)} | {
    "num_update", "last_lr", "cur_lr", "aggregate_updates", "states", "states_synced", "auto_reload",
}  # fmt: skip


def attributes_set_on(source, is_foreign):
    """(line, code) of each statement that sets an attribute on a foreign object which its class does not have.

    Objects that become ones of a class of ours, by their ``__class__``, are ours.

    Example:
        >>> attributes_set_on("trainer.plan = 1; self.plan = 2; setattr(self.trainer, NAME, 3)", FOREIGN.search)
        [(1, 'trainer.plan'), (1, 'setattr(self.trainer, NAME, 3)')]
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
            if is_foreign(ast.unparse(node.value)) and node.attr not in PUBLIC | {"__class__"}:
                found.append((node.lineno, ast.unparse(node)))
        elif isinstance(node, ast.Call) and node.args and is_foreign(ast.unparse(node.args[0])):
            if ast.unparse(node.func) in ("setattr", "delattr", "object.__setattr__"):
                found.append((node.lineno, ast.unparse(node)))
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
            inner = re.match(r"vars\((.*)\)$|(.*)\.__dict__$", ast.unparse(node.value))
            if inner and is_foreign(inner[1] or inner[2]):
                found.append((node.lineno, ast.unparse(node)))
    return found


def test_nothing_is_set_on_objects_of_others_but_through_the_registry():
    found = {}
    for module, file in modules():
        if module.partition("/")[0] not in (*ROOMS, "models"):  # the examples build nets of GluonCV out of their parts
            for line, code in attributes_set_on(file.read_text("utf-8"), FOREIGN.search):
                found[f"{file.relative_to(PACKAGE)}:{line}"] = code
    assert not found, "attach it: gluon_parallel/mxnet/attached.py"


STORES = {"Store", "MPI", "Servers", "Horovod", "Contract", "Foreign", "Alone", "KVStore", "KVStoreBase"}


def kinds_of_stores_asked_for(source):
    """(line, code) of each place that asks for a store's class or compares its name.

    Example:
        >>> kinds_of_stores_asked_for("isinstance(s, (int, b.MPI)); type(s) is Store; store.type == 'mpi'; a.type == 1")
        [(1, 'isinstance(s, (int, b.MPI))'), (1, "store.type == 'mpi'"), (1, 'type(s) is Store')]
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        code = ast.unparse(node) if isinstance(node, (ast.Call, ast.Compare)) else ""
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
            is_asked = STORES & set(re.findall(r"\w+", ast.unparse(node.args[1])))
        else:
            is_asked = isinstance(node, ast.Compare) and re.search(
                rf"store\w*(\(\w+\))?\.type\b|^type\(.*\b({'|'.join(sorted(STORES))})\b", code
            )
        if is_asked:
            found.append((node.lineno, code))
    return sorted(found)


def test_what_a_store_can_do_is_asked_by_protocols_outside_of_kvstore():
    found = {}
    for module, file in modules():
        if module not in ("kvstore", "asynchronous"):  # the latter has stores of another kind
            for line, code in kinds_of_stores_asked_for(file.read_text("utf-8")):
                found[f"{file.relative_to(PACKAGE)}:{line}"] = code
    assert not found, "ask offers(store, one of gluon_parallel/kvstore/protocols.py)"
