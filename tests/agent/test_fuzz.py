"""200 argument sets and tool calls that nobody would write: each is answered with one JSON object of the contract.

Seeded, so a failure repeats. Children are stand-ins that refuse everything (standin.py): what is tried here is what reads
and checks arguments and paths, in this process. No path of the pool leads out of the test's own folder for writing.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent import cli, handles, plan, probing, supervisor, tools
from agent.commands import VERBS
from agent.folder import check_against_schema
from agent.render import MOST_CHARACTERS, text_of
from agent.roots import Roots
from finetune.errors import EXIT_CODES
from finetune.methods import METHODS
from tests.agent.calls import TINY
from tests.agent.standin import replace_children

TEXTS = [
    "",
    " ",
    "-1",
    "0",
    "1",
    "3",
    "0.5",
    "1e400",
    "nan",
    "-inf",
    "none",
    "true",
    "x" * 9000,
    "9" * 400,
    "9007199254740992",
    "2147483647",
    "\x1b[31mred\x1b[0m",
    "\u202eover",
    "日本語",
    "🙂",
    "a\nb\rc",
    "\udcff",
    "rows.jsonl",
    "rows.jsonl:0.5",
    "rows.jsonl:nan",
    "bad.jsonl",
    "folder",
    "folder/",
    "run",
    "run/run.json",
    "damaged",
    "c.yaml",
    "../up",
    "OUTSIDE",
    "OUTSIDE/rows.jsonl",
    "~",
    "~/x",
    ".",
    "..",
    "a/" * 3000,
    "n" * 300,
    "builtin:tiny",
    "builtin:nothing",
    "builtin:tiny?vocabulary=x",
    "builtin:tiny?context=99999999999&seed=-1",
    "builtin:arithmetic",
    "org/name",
    "org/name:0.5",
    "{",
    "[]",
    "(",
    "*",
    "%s%n",
    "{0}",
    "prompt=question",
    "=",
    "v.py:score",
    "v.py:score:-1",
    "exact:0.5",
    "schema=bad.jsonl",
    "https://user:password@host/",
    "hf_abcdefghijklmnop",
    "no_rows",
    "0123456789abcdef",
    "Traceback (most recent call last):\n  File 'x'\nKeyError: 1",
]
JUNK = [
    None,
    True,
    -1,
    0,
    7,
    2**70,
    0.5,
    -1e300,
    float("nan"),
    float("inf"),
    [],
    {},
    [[]],
    {"a": 1},
    ["x", 1],
]


@pytest.fixture
def work(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory: rows, a config, a verifier, and two folders that are runs in name only."""
    folder = tmp_path / "work"
    for name in ("folder", "run/logs", "damaged"):
        (folder / name).mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (folder / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 20)
    (folder / "bad.jsonl").write_bytes(b'{"prompt": \xff\n[1]\n\x00')
    (folder / "c.yaml").write_text("method: grpo\nmodel: builtin:tiny\ndata: rows.jsonl\nengine: local\n")
    (folder / "v.py").write_text("def score(completion): return 1.0\n")
    (folder / "run" / "state.json").write_text("{}")
    (folder / "run" / "logs" / "launch.log").write_bytes(b"\xff\x00\x1b[31m" * 5000)
    for name in ("state.json", "run.json", "plan.json"):
        (folder / "damaged" / name).write_text("[")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder / "home"))
    monkeypatch.setenv("FINETUNE_STANDIN", "refuse:all")
    stand_in(monkeypatch)
    return folder


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all children be stand-ins, as the command of standin.py does, until the test has ended."""
    for module, name in (
        (plan, "launch_argv"),
        (probing, "start_child"),
        (supervisor, "supervisor_command"),
        (handles, "our_command"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))
    replace_children()


def some_text(draw: random.Random, work: Path) -> str:
    return draw.choice(TEXTS).replace("OUTSIDE", str(work.parent / "outside"))


def argument_set(draw: random.Random, work: Path) -> list[str]:
    """Return a verb with flags of its own and of a method, with values that fit or do not, and now and then nonsense."""
    verb = draw.choice([name for name in VERBS if name != "serve-mcp"])
    method = draw.choice(list(METHODS.values())) if VERBS[verb].takes_settings else None
    parser = cli.make_parser(verb, method, advanced=True)
    actions = [
        action
        for action in parser._actions
        if action.option_strings and action.dest not in ("help", "help_all")
    ]
    argv = [verb, "--quick"] if verb == "doctor" else [verb]  # importing everything takes most of a minute
    if method and draw.random() < 0.7:
        argv += ["--method", method.name, *TINY[2:], "--data", "rows.jsonl"]
    for action in parser._actions:
        if not action.option_strings and draw.random() < 0.9:
            argv.append(some_text(draw, work))
    for action in draw.sample(actions, k=min(len(actions), draw.choice((0, 1, 1, 2, 3)))):
        flag = draw.choice(action.option_strings)
        argv += [flag] if action.nargs == 0 and draw.random() < 0.9 else [f"{flag}={some_text(draw, work)}"]
    if draw.random() < 0.15:
        argv.append(draw.choice(["--nonsense", "--", "--data", some_text(draw, work)]))
    return [argument for argument in argv if argument not in ("-h", "--help", "--help-all")]


def tool_call(draw: random.Random, work: Path) -> tuple[str, Any]:
    """Return a tool and arguments that its schema admits or does not, as an object or as its text."""
    name = draw.choice([*tools.BY_NAME, "ft_nothing", ""])
    known = tools.parameters(name)["properties"] if name in tools.BY_NAME else {}
    given = {each: value_for(draw, known[each], work) for each in known if draw.random() < 0.5}
    given |= {"quick": True} if "quick" in known else {}
    if "method" in known and draw.random() < 0.7:
        given |= {"method": "sft", "settings": {"model": "builtin:tiny", "data": ["rows.jsonl"]}}
        every = list(known["settings"]["properties"].items())
        for each, schema in draw.sample(every, k=min(len(every), draw.choice((0, 1, 2)))):
            given["settings"][each] = value_for(draw, schema, work)
    if draw.random() < 0.1:
        given[some_text(draw, work)] = draw.choice(JUNK)
    if draw.random() < 0.1:
        return name, draw.choice([*JUNK, *TEXTS])
    return name, json.dumps(given) if draw.random() < 0.3 else given


def value_for(draw: random.Random, schema: dict[str, Any], work: Path) -> Any:
    if draw.random() < 0.2:
        return draw.choice(JUNK)
    if "enum" in schema:
        return draw.choice(schema["enum"])
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    made: dict[str, Callable[[], Any]] = {
        "string": lambda: some_text(draw, work),
        "integer": lambda: draw.choice([0, 1, 3, 50, 10**6]),
        "number": lambda: draw.choice([0, 0.5, 1e-9, 3.0]),
        "boolean": lambda: draw.random() < 0.5,
        "null": lambda: None,
        "array": lambda: [some_text(draw, work) for _ in range(draw.choice((0, 1, 2)))],
        "object": lambda: {some_text(draw, work): draw.choice(JUNK)},
    }
    return made[draw.choice(kinds)]()


def hold(answer: dict[str, Any], code: int, what: Any) -> None:
    """Check an answer against the contract; a bug of ours is none."""
    check_against_schema("answer", answer)
    errors = [error["code"] for error in answer["errors"]]
    assert code == (EXIT_CODES[errors[0]] if errors else 0), what
    assert answer["ok"] == (code == 0), what
    assert "bug" not in errors, (what, answer["errors"])
    assert "hf_abcdefghijklmnop" not in text_of(answer), what


@pytest.mark.parametrize("seed", range(10))
def test_ten_argument_sets_get_ten_answers(
    seed: int, work: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    for _ in range(10):
        argv = argument_set(draw, work)
        capsys.readouterr()
        code = cli.main(argv)
        printed = capsys.readouterr().out
        assert printed.endswith("\n"), argv
        assert printed.count("\n") == 1, argv
        assert len(printed) <= MOST_CHARACTERS + 1, argv
        assert '"Traceback' not in printed or "Traceback" in "".join(argv), argv
        hold(json.loads(printed), code, argv)


@pytest.mark.parametrize("seed", range(10, 20))
def test_ten_tool_calls_get_ten_answers(
    seed: int, work: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    draw, roots = random.Random(seed), Roots.of([work])
    for _ in range(10):
        name, arguments = tool_call(draw, work)
        answer = tools.call(name, arguments, roots)
        assert len(text_of(answer)) <= MOST_CHARACTERS, (name, arguments)
        assert capsys.readouterr().out == "", (name, arguments)
        hold(answer, tools.exit_code(answer), (name, arguments))
        assert not list((work.parent / "outside").iterdir()), (name, arguments)
