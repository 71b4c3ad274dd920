"""The shape of the code base, checked: who may import whom, where heavy libraries enter, how long and how named files may be."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("finetune", "agent")
# A file may import any file that stands before it. A file that is not named here fails.
ORDER = """
finetune.errors finetune.records finetune.knobs finetune.agent_config finetune.config finetune.rules finetune.methods
finetune.boxes.entry finetune.boxes.watching finetune.boxes.launching finetune.boxes.process finetune.boxes.users
finetune.boxes.container finetune.boxes.bubblewrap finetune.boxes.programs finetune.boxes.folders
finetune.data.conversation finetune.data.arguments finetune.data.formats finetune.data.reasoning
finetune.data.task_files finetune.data.rows
finetune.data.template
finetune.data.tokens finetune.data.chat finetune.data.split
finetune.domains.base finetune.domains.text finetune.domains.math finetune.domains.reasoning finetune.domains.registry
finetune.domains.prompts
finetune.domains.python_tests finetune.domains.answers finetune.domains.judging finetune.domains.workers
finetune.domains.verifiers finetune.domains.checking
finetune.domains.task_judge finetune.domains.tasks finetune.domains.task_checking
finetune.data.account finetune.data.store finetune.data.preparation finetune.data.prompts finetune.data.prepare
finetune.data.batches finetune.data.prefixes
finetune.parallel.world finetune.parallel.profile finetune.parallel.shard
finetune.model.catalogue finetune.model.source finetune.model.footprint finetune.model.attention
finetune.model.builtin finetune.model.adapter finetune.model.lora finetune.model.logprobs finetune.model.policy
finetune.model.optimizer finetune.model.checkpoint finetune.model.card finetune.model.export finetune.model.whole
finetune.rollout.engine finetune.rollout.local finetune.rollout.guard finetune.rollout.serverlog
finetune.rollout.server finetune.rollout.answers finetune.rollout.control finetune.rollout.slots finetune.rollout.vllm
finetune.rollout.weights finetune.rollout.versions finetune.rollout.canary finetune.rollout.proving
finetune.rollout.sync finetune.rollout.fleet finetune.rollout.ledger finetune.rollout.served
finetune.rollout.toolcalls finetune.rollout.fitting finetune.rollout.transcript finetune.rollout.sampling_pool
finetune.rollout.wire finetune.rollout.calls finetune.rollout.endpoint finetune.rollout.bridge
finetune.rollout.harness_program finetune.rollout.harness_loop finetune.rollout.harness_mini
finetune.rollout.harness_opencode finetune.rollout.harness
finetune.train.metrics finetune.train.corrections finetune.train.losses finetune.train.advantages
finetune.train.evaluate finetune.train.held_out finetune.train.step finetune.train.result
finetune.train.segments finetune.train.sampling finetune.train.agents finetune.train.rollouts
finetune.train.policy_step finetune.train.delivery finetune.train.source
finetune.train.sft finetune.train.grpo finetune.train.grpo_checks finetune.train.workload
finetune.probe finetune.rank finetune.launch
agent.environment agent.detaching agent.processes agent.system agent.folder agent.states agent.tracebacks
agent.hints agent.manifest agent.verifying
agent.request agent.preflight agent.engines agent.decisions agent.speed agent.estimates agent.checks
agent.plan agent.health agent.monitor agent.render agent.console
agent.report.reading agent.report.curves agent.report.conversations agent.report.rollouts agent.report.figures agent.report.tables
agent.report.page agent.report.picture agent.report.writing
agent.probing agent.budgets agent.attempt
agent.words agent.standing agent.runner agent.supervisor agent.handles agent.control agent.jobs agent.trial
agent.symptoms agent.doctor
agent.explaining agent.verbs agent.skills agent.serving agent.task_checks agent.auditing
agent.flags agent.commands agent.cli agent.roots agent.toolset agent.tools
agent.mcp
""".split()
PLACE = {module: place for place, module in enumerate(ORDER)}
# Where a heavy library may be imported: a module by its full name, or a package by its name and a dot.
DOORS = {
    "torch.distributed": ("finetune.parallel.", "finetune.rank"),
    "peft": ("finetune.model.",),
    "transformers": ("finetune.model.", "finetune.data.chat", "finetune.rollout.local"),
    "httpx": ("finetune.rollout.server", "finetune.rollout.control", "finetune.rollout.vllm"),
    "vllm": (),  # only in processes of its own
    "rich": ("agent.console",),
    "matplotlib": ("agent.report.picture",),
    "mcp": ("agent.mcp",),
}
HEAVY = {"torch", "transformers", "peft", "accelerate", "trl", "tokenizers", "safetensors"}
CATCHES_ALL = {
    "finetune.errors",
    "finetune.domains.judging",
    "finetune.domains.task_judge",
    "finetune.rank",
    "finetune.probe",
    "agent.runner",
}
VAGUE = re.compile(r"(^|_)(utils?|helpers?|common|misc|managers?)(_|$)")
DESK = ROOT / "finetune/domains/desk"  # tasks that ship as data: their verifiers are no modules
FILES = sorted(
    path
    for top in PACKAGES
    for path in (ROOT / top).rglob("*.py")
    if path.name != "__init__.py" and not path.is_relative_to(DESK)
)
SOURCES = sorted(
    path for top in (*PACKAGES, "scripts", "proof", "bench", "tests") for path in (ROOT / top).rglob("*.py")
)


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def imported_modules(path: Path) -> Iterator[str]:
    """Yield the full name of each imported module, wherever in the file; `from package import module` counts as that module."""
    package = module_name(path).split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            source = ".".join(part for part in (base, node.module) if part)
            yield from (imported_from(source, alias.name) for alias in node.names)


def imported_from(source: str, name: str) -> str:
    """Return the module that `from source import name` reads: name itself where it is a module, of ours or a heavy library's."""
    inside = f"{source}.{name}"
    is_ours = (ROOT / inside.replace(".", "/")).with_suffix(".py").exists()
    return inside if is_ours or inside in DOORS else source


def within(module: str, name: str) -> bool:
    """Whether `module` is `name` or lies in it; a name that ends in a dot is a package."""
    return module.startswith(name) if name.endswith(".") else module == name or module.startswith(name + ".")


def misplaced(module: str, imports: list[str]) -> list[str]:
    """Return the imports of our own modules that do not stand before `module`."""
    ours = [name for name in imports if name.split(".")[0] in PACKAGES and name not in PACKAGES]
    return [name for name in ours if PLACE.get(name, len(ORDER)) >= PLACE[module]]


def closed_doors(module: str, imports: list[str]) -> list[str]:
    """Return the heavy libraries that `module` imports and has no door to."""
    return [
        name
        for name in imports
        for library, doors in DOORS.items()
        if within(name, library) and not any(within(module, door) for door in doors)
    ]


def test_a_module_before_its_turn_and_a_closed_door_are_found() -> None:
    assert misplaced("finetune.config", ["finetune.knobs", "finetune.methods", "json"]) == [
        "finetune.methods"
    ]
    assert misplaced("finetune.config", ["agent.plan", "finetune.unheard_of"]) == [
        "agent.plan",
        "finetune.unheard_of",
    ]
    assert closed_doors("finetune.train.step", ["torch", "torch.distributed", "peft.tuners"]) == [
        "torch.distributed",
        "peft.tuners",
    ]
    assert closed_doors("finetune.parallel.world", ["torch.distributed.fsdp"]) == []


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_point_back(path: Path) -> None:
    name = module_name(path)
    assert name in PLACE, f"give {name} its place in ORDER"
    assert not misplaced(name, list(imported_modules(path))), f"{name} may import only what stands before it"


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_heavy_libraries_have_doors(path: Path) -> None:
    assert not closed_doors(module_name(path), list(imported_modules(path)))


def test_torch_is_unreachable_from_agent() -> None:
    """Follow every import, also those inside functions, from agent through finetune: none leads to a heavy library."""
    seen: set[str] = set()
    queue = [name for name in ORDER if name.startswith("agent.")]
    while queue:
        name = queue.pop()
        path = (ROOT / name.replace(".", "/")).with_suffix(".py")
        if name in seen or not path.exists():
            continue
        seen.add(name)
        imports = list(imported_modules(path))
        assert not {module.split(".")[0] for module in imports} & HEAVY, f"{name} imports {imports}"
        queue += [module for module in imports if module in PLACE]
    assert any(name.startswith("finetune.") for name in seen)


def test_importing_every_agent_module_loads_no_torch() -> None:
    modules = [module_name(path) for path in FILES if module_name(path).startswith("agent.")]
    code = f"import sys, {', '.join(modules)}; print(*sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


def test_finetune_never_imports_agent() -> None:
    reached = {
        module_name(path) for path in FILES for name in imported_modules(path) if within(name, "agent")
    }
    assert not [name for name in reached if name.startswith("finetune.")]


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_files_and_functions_stay_short(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < 60, node.name


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_names_say_something_and_modules_are_described(path: Path) -> None:
    assert not VAGUE.search(path.stem), "a file is named after what it holds"
    text = path.read_text()
    assert not text.strip() or ast.get_docstring(ast.parse(text)), "the first line says what the module holds"


def catches_all(node: ast.ExceptHandler) -> bool:
    """Whether the handler stops every exception: one that raises again stops none."""
    kinds = (
        {child.id for child in ast.walk(node.type) if isinstance(child, ast.Name)}
        if node.type
        else {"Exception"}
    )
    raises = any(isinstance(child, ast.Raise) and child.exc is None for child in node.body)
    return bool(kinds & {"Exception", "BaseException"}) and not raises


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_only_boundaries_catch_everything(path: Path) -> None:
    if module_name(path) in CATCHES_ALL:
        return
    handlers = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ExceptHandler)]
    assert not [node.lineno for node in handlers if catches_all(node)], "use finetune.errors.boundary"
