"""Rollouts in reports: every token with its text and ratio, what has no room, what is masked; and pages in a browser."""

import json
import re
from pathlib import Path

import pytest

from agent.folder import RunFolder
from agent.report.page import run_page
from agent.report.reading import read_run
from agent.report.rollouts import pieces, rollouts_of, spread
from agent.report.writing import write_reports
from finetune.rank import run_rank
from finetune.records import StopFlag
from tests.agent.calls import CPU
from tests.agent.reported import HOSTILE, TOKENS, UNSEEN, Page, batch, opened, rollout, write_run
from tests.train.runs import make_prompts_run

REWARDS = Path(__file__).parents[1] / "train" / "rewards.py"


def page_of(folder: RunFolder, secrets: tuple[str, ...] = ()) -> Page:
    return Page(run_page(read_run(folder, "here"), secrets)[0])


def test_secrets_are_in_no_report(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", cmd_replay="KEY=planted-secret-value run", outputs=[])
    spelled = {"9": "planted-", "10": "secret-value", "11": " hf_abcdefghijklmnop"}
    answers = [rollout(0, 0, completion_ids=[3, 9, 10]), rollout(0, 1, completion_ids=[11, 6, 7])]
    answers[0]["text"], answers[1]["error"] = "so planted-secret-value", "key planted-secret-value"
    path = folder.path / "rollouts" / "step-000002.jsonl"
    path.write_text(batch(2, answers, tokens=TOKENS | spelled))
    (folder.path / "rollouts" / "eval-000004.jsonl").write_text(batch(4, answers, "eval", tokens=TOKENS))
    text, _ = run_page(read_run(folder, "here"), ("planted-secret-value",))
    assert "planted-secret" not in text
    assert "hf_abcdefgh" not in text
    shown = Page(text).payload["rollouts"]["steps"][1]["rollouts"]
    assert (shown[0]["tokens"], shown[0]["text"], shown[0]["is_masked"]) == (None, "so ***", True)


def test_tokens_have_their_texts_log_probs_and_ratios(tmp_path: Path) -> None:
    payload = page_of(write_run(tmp_path / "run")).payload["rollouts"]
    assert [step["step"] for step in payload["steps"]] == [1, 2]
    second = payload["steps"][1]
    texts = second["texts"]
    one = next(item for item in second["rollouts"] if item["id"] == "1-0-1")
    assert [texts[place] for place in one["tokens"]] == [[3, " the"], [6, " answer"], [7, "\n2"]]
    assert [texts[place][1] for place in second["prompts"][one["prompt"]]["tokens"]] == [
        "<|user|>",
        "What is 1+1?",
    ]
    assert one["logps"] == [-1.0, -0.5, -0.25]
    assert one["ratios"] == [1.0, 2.0, 0.5]
    assert one["mean_ratio_distance"] == pytest.approx(2 * 0.693147 / 3, abs=1e-5)
    split = next(item for item in second["rollouts"] if item["id"] == "1-1-0")
    assert [texts[place][1] for place in split["tokens"]] == [" the", "", "é", "</script>"]
    assert split["ratios"] is None
    assert all(item["ratios"] is None for item in payload["steps"][0]["rollouts"])


def test_rollouts_without_texts_of_tokens_are_shown_whole(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder.path / "rollouts" / "step-000001.jsonl").write_text(batch(1, [rollout(0, 0)], tokens={}))
    (one,) = page_of(folder).payload["rollouts"]["steps"][0]["rollouts"]
    assert (one["tokens"], one["text"], one["is_masked"]) == (None, " the answer\n2", False)


def test_bytes_that_make_no_character_are_shown_as_such() -> None:
    assert pieces([4, 3, 5, 12], TOKENS) == ["", "\ufffd the", "\ufffd", "⟨12⟩"]
    assert "".join(pieces([3, 4], TOKENS)) == " the\ufffd"
    assert pieces([], TOKENS) == []


def test_what_has_no_room_is_left_out_and_said(tmp_path: Path) -> None:
    for step in range(1, 101):
        many = [rollout(group, sample) for group in range(8) for sample in range(2)]
        (tmp_path / f"step-{step:06d}.jsonl").write_text(batch(step, many))
    found = rollouts_of(tmp_path, (), most_bytes=40_000)
    steps = [step["step"] for step in found["steps"]]
    assert (steps[0], steps[-1]) == (1, 100)
    assert len(json.dumps(found)) < 60_000
    assert found["left_out"][0] == f"{100 - len(steps)} of 100 steps are not in this file"
    tight = rollouts_of(tmp_path, (), most_bytes=6_000)
    assert "step 1: 7 of 8 groups have no room" in tight["left_out"]
    assert all(len(step["rollouts"]) % 2 == 0 for step in tight["steps"]), "groups are whole"


def test_of_a_long_completion_the_middle_is_cut_out(tmp_path: Path) -> None:
    long = rollout(0, 0, completion_ids=[3] * 1500 + [6] * 1000 + [7] * 500, logprobs=[-1.0] * 3000)
    (tmp_path / "step-000001.jsonl").write_text(batch(1, [long]))
    found = rollouts_of(tmp_path, ())
    (one,) = found["steps"][0]["rollouts"]
    assert (one["num_tokens"], one["cut"], len(one["tokens"]), len(one["logps"])) == (
        3000,
        [1500, 1000],
        2000,
        2000,
    )
    assert {found["steps"][0]["texts"][place][1] for place in one["tokens"]} == {" the", "\n2"}
    assert found["left_out"] == ["step 1: of 1 completions the middle is cut out"]


def test_every_beginning_of_the_order_is_spread() -> None:
    assert spread(5) == [0, 4, 2, 1, 3]
    assert [sorted(spread(count)) for count in range(40)] == [list(range(count)) for count in range(40)]


def test_answers_before_and_after_stand_side_by_side(tmp_path: Path) -> None:
    text = page_of(write_run(tmp_path / "run")).text
    assert "Answers at step 0 and at step 4" in text
    assert "better: 1 rows" in text
    assert "worse: 1 rows" in text
    assert "equal: 1 rows" in text
    better = text[text.index("better: 1 rows") : text.index("worse: 1 rows")]
    assert "<|user|>What is 1+1? rows.jsonl:1 answer 0 at 0 reward 0.0 answer 0 at 4 reward 1.0" in better


@pytest.mark.slow
def test_a_real_run_is_shown_with_the_texts_and_ratios_of_its_tokens(tmp_path: Path) -> None:
    """The reader knows no tokenizer: what it shows is what the run has written."""
    run = make_prompts_run(tmp_path / "run", num_eval=2, max_steps=2, verifier=[f"{REWARDS}:even"])
    assert run_rank(run, 0, 1, None, StopFlag()).status == "succeeded"
    answer = write_reports([RunFolder(run)], None, CPU)
    assert [item["kind"] for item in answer.artifacts] == ["report", "picture"]
    page = Page((run / "report.html").read_text())
    assert "Answers at step 0 and at step 2" in page.text
    for step in page.payload["rollouts"]["steps"]:
        recorded = [json.loads(line) for line in (run / "rollouts" / f"step-{step['step']:06d}.jsonl").open()]
        for one, line in zip(step["rollouts"], recorded[1:], strict=True):
            texts = [step["texts"][place] for place in one["tokens"]]
            assert [token for token, _ in texts] == line["completion_ids"]
            assert (one["ratios"] is None) == (line["advantage"] == 0)
            assert all(ratio == pytest.approx(1, abs=1e-3) for ratio in one["ratios"] or [])
    assert any(one["ratios"] for one in page.payload["rollouts"]["steps"][0]["rollouts"])


@pytest.mark.slow
def test_chromium_opens_a_report_and_finds_views_by_their_address(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path / "run", settings={"system_prompt": {"value": HOSTILE + UNSEEN, "source": "user"}}
    )
    write_reports([folder], None, CPU)
    page = folder.path / "report.html"
    plain = opened(page, tmp_path / "profile")
    root = plain[: plain.index("<head>")]
    assert 'data-ready="yes"' in root
    assert "data-error" not in root
    assert "data-hacked" not in root
    assert plain.count('<figure class="chart"') >= 8
    assert re.search(r'id="rollouts"[^>]*data-step="2"[^>]*data-view="list"', plain)
    groups = opened(page, tmp_path / "profile", "step=1&view=groups&group=1&colour=advantage")
    assert re.search(
        r'id="rollouts"[^>]*data-step="1" data-view="groups" data-colour="advantage" data-shown="2"', groups
    )
    assert 'data-group="1"' in groups
    assert 'data-group="0"' not in groups
    assert 'data-status="timeout"' in groups
    found = opened(page, tmp_path / "profile", "colour=ratio&find=answer&show=trained")
    assert 'data-shown="2"' in found
    assert 'class="token hit"' in found
    ratio = re.search(r'title="id 6\nsampler\'s log-prob -0.5 [^"]*\nratio trainer / sampler 2"[^>]*>', found)
    assert ratio
    assert "rgba(var(--plus), 0.750)" in ratio[0]
    odd = opened(page, tmp_path / "profile", "colour=constructor&view=%3Cscript%3E&step=99&show=constructor")
    assert "data-error" not in odd[: odd.index("<head>")]


@pytest.mark.slow
def test_chromium_opens_a_comparison(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / name, run_id=f"grpo-{name}", with_rollouts=False) for name in ("a", "b c")
    ]
    write_reports(folders, tmp_path / "both.html", CPU)
    document = opened(tmp_path / "both.html", tmp_path / "profile")
    assert 'data-ready="yes"' in document[: document.index("<head>")]
    assert "data-error" not in document[: document.index("<head>")]
    assert document.count('<figure class="chart"') >= 8
    assert 'href="b%20c/report.html"' in document
