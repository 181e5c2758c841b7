"""The order of the rooms, and the size of what is in them."""

import ast
import pathlib

import pytest

import kldwrm_jax

PACKAGE = pathlib.Path(kldwrm_jax.__file__).parent
TOOLS = ["arguments", "batch_axis", "finite", "paths", "replicas"]  # of all rooms
ROOMS = [
    "likelihoods",
    "curvature",
    "capture",
    "wake",
    "kl_report",
    "optimizers",
    "train_state",
    "experiments",
]
STRANGERS = {"capture": {"wake"}, "wake": {"curvature", "capture"}}  # they know nothing of these

MODULES = sorted(
    path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.stem != "__init__"
)
each_module = pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))

# Public factories, whose arguments are the settings of a user.
FACTORIES = {
    *("kfac", "so_kldwrm", "q_kldwrm", "qe_kldwrm", "precondition"),
    "natural_gradient",
    *("instrument", "oracle", "tag", "fisher_over"),
}
MOST_LINES, MOST_ARGUMENTS = 60, 7


def room_of(path):
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def rooms_imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            package, *rest = name.split(".")
            if package == "kldwrm_jax" and rest:
                yield rest[0]


@each_module
def test_a_room_imports_only_from_those_before_it(path):
    room, order = room_of(path), TOOLS + ROOMS
    imported = {other for other in rooms_imported(path) if other in order}
    if room in TOOLS:
        assert imported <= {*TOOLS}
    else:
        allowed = {*order[: order.index(room) + 1]} - STRANGERS.get(room, set())
        assert imported <= allowed


def test_every_module_is_in_a_room():
    assert {room_of(path) for path in MODULES} == {*TOOLS, *ROOMS}


def functions(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name not in FACTORIES:
            yield node


@each_module
def test_functions_are_short_and_take_few_arguments(path):
    for node in functions(path):
        assert node.end_lineno - node.lineno < MOST_LINES, node.name
        own = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        own = [argument for argument in own if argument.arg not in ("self", "cls")]
        assert len(own) <= MOST_ARGUMENTS, node.name
