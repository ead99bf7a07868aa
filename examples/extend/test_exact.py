import exact  # noqa: F401, it registers the part

from luffy.api import Problem, build_verifier


def test_exact():
    problem = Problem(id="1", prompt="2+3", answer="5")
    with build_verifier("exact", workers=1) as verifier:
        scores = verifier.score([(problem, "2+3 is\n#### 5"), (problem, "#### 5.0")])
    assert [score.value for score in scores] == [1.0, 0.0]
