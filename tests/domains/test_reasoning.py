"""Puzzles of reasoning-gym: the same rows everywhere, two sides without a shared question, and their scores."""

import json

import pytest

from finetune.data.reasoning import entry_of, eval_side, puzzles_of, reasoning_rows
from finetune.data.rows import eval_sources, read_rows
from finetune.domains.reasoning import reasoning_score
from finetune.domains.registry import load_domain
from finetune.domains.verifiers import Answer, open_verifiers
from finetune.errors import FinetuneError, Problems
from finetune.records import Row

SUMS = "builtin:reasoning-gym/chain_sum?size=40&eval_size=20&min_terms=2&max_terms=2"


def made(name, seed, places, **config):
    """The puzzles as the package itself gives them."""
    import reasoning_gym

    puzzles = reasoning_gym.create_dataset(name, seed=seed, size=1000, **config)
    return [puzzles[place] for place in places]


def test_the_rows_are_the_packages_own_puzzles():
    rows = read_rows([SUMS])
    expected = made("chain_sum", 0, range(40), min_terms=2, max_terms=2)
    assert [row.values["prompt"] for row in rows.rows] == [entry["question"] for entry in expected]
    assert [row.values["answer"] for row in rows.rows] == [entry["answer"] for entry in expected]
    assert rows.columns == ["prompt", "answer", "task", "config", "entry"]
    assert json.loads(rows.rows[0].values["config"]) == {"min_terms": 2, "max_terms": 2}
    assert entry_of(rows.rows[3].values["entry"]) == expected[3]
    json.dumps([row.values for row in rows.rows])


def test_the_held_out_side_shares_no_question():
    sides = eval_sources([SUMS])
    assert sides == [SUMS.replace("chain_sum", "chain_sum:eval")]
    held_out = [row.values["prompt"] for row in read_rows(sides).rows]
    train = [row.values["prompt"] for row in read_rows([SUMS]).rows]
    assert len(held_out) == len(set(held_out)) == 20
    assert not set(held_out) & set(train)
    assert eval_side(sides[0]) is None
    assert eval_sources([*sides, SUMS]) == []
    assert eval_sources(["builtin:arithmetic", SUMS]) == ["builtin:arithmetic:eval", *sides]


@pytest.mark.slow
def test_a_task_with_few_questions_has_each_once():
    rows = reasoning_rows("builtin:reasoning-gym/tower_of_hanoi?size=100")
    questions = [row["prompt"] for row in rows]
    assert len(questions) == len(set(questions)) < 100


def test_sizes_have_defaults():
    assert puzzles_of("builtin:reasoning-gym/leg_counting").sizes == {"size": 500, "eval_size": 200}


@pytest.mark.slow
def test_the_rows_do_not_depend_on_the_hash_seed(monkeypatch):
    name = "builtin:reasoning-gym/word_ladder?size=3&eval_size=1"  # one of the tasks that iterate over sets
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    first = reasoning_rows(name)
    monkeypatch.setenv("PYTHONHASHSEED", "2")
    assert reasoning_rows(name + "&size=3") == first


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("chain_sums", "did you mean chain_sum?"),
        pytest.param("chain_sum?terms=3", "terms", marks=pytest.mark.slow),
        ("chain_sum?size=0", "size=0"),
        ("chain_sum?size=many", "size=many"),
        pytest.param("composite", "cannot make these puzzles", marks=pytest.mark.slow),
    ],
)
def test_names_that_give_no_puzzles(name, told):
    with pytest.raises((FinetuneError, Problems)) as caught:
        read_rows([f"builtin:reasoning-gym/{name}"])
    error = caught.value.errors[0] if isinstance(caught.value, Problems) else caught.value
    assert error.code == "bad_value"
    assert told in error.message


def test_without_the_package_it_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FinetuneError) as caught:
        read_rows(["builtin:reasoning-gym/chain_sum?size=7"])
    assert caught.value.code == "missing_package"


def test_the_domain_of_such_rows_and_its_verifier():
    rows = read_rows([SUMS]).rows
    domain = load_domain("auto", [SUMS])
    assert domain.name == "reasoning-gym"
    turns = domain.conversation(rows[0]).messages
    assert [turn["content"] for turn in turns] == [rows[0].values["prompt"], rows[0].values["answer"]]
    right = rows[0].values["answer"]
    texts = [right, f"I think <answer> {right} </answer>", "<answer>x</answer>" + right, "", "zzz"]
    with open_verifiers(["auto"], [], domain, 60.0) as verifiers:
        rewards = verifiers.score([Answer(rows[0].values, text) for text in texts])
    assert [reward.value for reward in rewards[:2]] == [1.0, 1.0]
    assert all(reward.value < 0.5 for reward in rewards[2:])


@pytest.mark.slow
def test_a_scorer_that_compares_tuples_gets_tuples():
    row = reasoning_rows("builtin:reasoning-gym/arc_agi?size=1&eval_size=1")[0]
    assert reasoning_score(row, row["answer"]) == 1.0


@pytest.mark.slow
def test_an_answer_on_which_a_scorer_raises_is_wrong_where_the_puzzles_own_is_not():
    row = reasoning_rows("builtin:reasoning-gym/prime_factorization?size=1&eval_size=1")[0]
    assert reasoning_score(row, "zzz") == 0.0
    assert reasoning_score(row, row["answer"]) == 1.0
    broken = row | {"entry": repr(entry_of(row["entry"]) | {"answer": "yyy"})}
    with pytest.raises(FinetuneError) as caught:
        reasoning_score(broken, "zzz")
    assert caught.value.code == "bad_verifier"


@pytest.mark.slow
def test_a_task_without_answers_is_only_asked():
    row = reasoning_rows("builtin:reasoning-gym/graph_color?size=1&eval_size=1")[0]
    assert "answer" not in row
    turns = load_domain("reasoning-gym", []).conversation(Row(row, "f", 1)).messages
    assert [turn["role"] for turn in turns] == ["user"]


def test_rows_from_elsewhere_are_refused():
    with pytest.raises(FinetuneError) as caught:
        reasoning_score({"answer": "5"}, "5")
    assert caught.value.code == "unknown_columns"
