"""avg@k and pass@k against what they mean."""

from itertools import combinations

import pytest

from luffy.evaluation.accuracy import mean_pass_at_k, pass_at_k, reported_k, summarise


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(n):
    for correct in range(n + 1):
        samples = [1] * correct + [0] * (n - correct)
        for k in range(1, n + 1):
            subsets = list(combinations(samples, k))
            assert pass_at_k(n, correct, k) == pytest.approx(sum(map(max, subsets)) / len(subsets), abs=1e-12)


def test_pass_at_k_refuses_what_is_undefined():
    for n, correct, k in ((4, 1, 5), (4, 1, 0), (4, 5, 1)):
        with pytest.raises(ValueError, match="undefined"):
            pass_at_k(n, correct, k)


def test_pass_at_k_stays_exact_for_many_samples():
    assert pass_at_k(2000, 1, 1000) == pytest.approx(0.5)


def test_reported_k():
    assert [reported_k(k) for k in (1, 2, 6, 32)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8, 16, 32]]


def scored_row(item, score, tokens=10, finish="stop", status="ok"):
    return {"benchmark": "b", "id": item, "score": score, "tokens": tokens, "finish": finish, "status": status}


def test_summary_by_hand():
    rows = [
        scored_row("a", 1.0, 10), scored_row("a", 0.0, 30, "length", "no_answer"),
        scored_row("b", 0.0, 20), scored_row("b", 0.0, 20),
        scored_row("c", 1.0, 40), scored_row("c", 1.0, 60),
    ]  # fmt: skip
    summary = summarise(rows, k=2)
    assert (summary.items, summary.k) == (3, 2)
    assert summary.accuracy == pytest.approx(0.5)
    assert summary.standard_error == pytest.approx(0.5 / 3**0.5)  # item accuracies 0.5, 0, 1
    assert summary.pass_at == {1: pytest.approx(0.5), 2: pytest.approx(2 / 3)}
    assert summary.mean_tokens == pytest.approx(30)
    assert summary.mean_tokens_right == pytest.approx(110 / 3)
    assert summary.mean_tokens_wrong == pytest.approx(70 / 3)
    assert summary.truncated == pytest.approx(1 / 6)
    assert summary.statuses == {"ok": 5, "no_answer": 1}
    assert mean_pass_at_k(rows, 1) == pytest.approx(summary.accuracy)


def test_a_score_between_0_and_1_is_not_right():
    summary = summarise([scored_row("a", 0.9)], k=1)
    assert (summary.accuracy, summary.mean_score, summary.mean_tokens_right) == (0.0, 0.9, None)
