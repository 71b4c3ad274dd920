"""One declaration gives flag, schema and check; all problems come at once."""

from dataclasses import dataclass
from typing import Literal

import jsonschema
import pytest

from finetune.config import SftConfig
from finetune.errors import FinetuneError, Problems
from finetune.knobs import FlagParser, add_flags, build, json_schema, knob, knobs


@dataclass(frozen=True, kw_only=True)
class Oven:
    dish: str = knob(help="what to bake")
    heat: int = knob(200, at_least=50, at_most=300, help="degrees")
    share: float = knob(0.5, above=0, below=1, help="of the dish, in %")
    fan: bool = knob(False, help="use the fan", advanced=True)
    mode: Literal["top", "bottom"] | None = knob(None, help="where the heat comes from", identity=False)
    timers: list[str] = knob([], help="when to look")


def parsed(*arguments: str) -> Oven:
    parser = FlagParser()
    add_flags(parser, Oven)
    made: Oven = build(Oven, vars(parser.parse_args(arguments)))
    return made


def test_flags_become_values_of_the_declared_kind() -> None:
    oven = parsed(
        "--dish",
        "pie",
        "--heat",
        "180",
        "--share",
        "1e-1",
        "--fan",
        "--mode",
        "top",
        "--timers",
        "a",
        "b",
        "--timers",
        "c",
    )
    assert oven == Oven(dish="pie", heat=180, share=0.1, fan=True, mode="top", timers=["a", "b", "c"])
    assert parsed("--dish", "pie", "--mode", "none").mode is None


def test_every_problem_is_in_one_error() -> None:
    with pytest.raises(Problems) as caught:
        build(Oven, {"heat": 20, "share": float("nan"), "mode": "side", "haet": 3})
    messages = [error.message for error in caught.value.errors]
    for word in ("dish: required", "heat: 20", "share: nan is not finite", "mode:", "did you mean heat?"):
        assert any(word in message for message in messages), (word, messages)
    assert {error.code for error in caught.value.errors} == {"usage", "bad_value", "unknown_setting"}
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("heat", 49),
        ("heat", 301),
        ("heat", "warm"),
        ("heat", 2.5),
        ("heat", True),
        ("share", 0),
        ("share", 1),
        ("share", float("inf")),
        ("fan", "perhaps"),
    ],
)
def test_bounds_and_kinds_are_kept(name: str, value: object) -> None:
    with pytest.raises(Problems) as caught:
        build(Oven, {"dish": "pie", name: value})
    assert [error.evidence["setting"] for error in caught.value.errors] == [name] * len(caught.value.errors)


def test_whole_floats_are_integers() -> None:
    heat = build(Oven, {"dish": "pie", "heat": 200.0}).heat
    assert (heat, type(heat)) == (200, int)


def test_no_abbreviations_and_no_exit() -> None:
    with pytest.raises(FinetuneError) as caught:
        parsed("--dis", "pie")
    assert caught.value.code == "usage"


def test_schema_agrees_with_the_check() -> None:
    schema = json_schema(Oven)
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate({"dish": "pie", "mode": None, "timers": ["a"]}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"dish": "pie", "heat": 301}, schema)
    assert "fan" not in json_schema(Oven, advanced=False)["properties"]


def test_help_shows_common_settings_and_percent_signs() -> None:
    parser = FlagParser()
    add_flags(parser, Oven)
    text = parser.format_help()
    assert "--heat" in text
    assert "%" in text
    assert "use the fan" not in text


def test_at_most_forty_settings_are_shown_and_each_is_explained() -> None:
    items = knobs(SftConfig)
    assert len([item for item in items if not item.advanced]) <= 40
    assert all(item.help for item in items)
    assert not any("_" in item.flag for item in items)


def test_an_unknown_bound_is_our_own_mistake() -> None:
    with pytest.raises(TypeError, match="minimum"):
        knob(1, minimum=0)
