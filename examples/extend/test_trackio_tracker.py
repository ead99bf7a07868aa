import sys
from types import SimpleNamespace

import trackio_tracker  # noqa: F401, it registers the part

from luffy.api import load_config
from luffy.run_folder.trackers import start_tracker


def test_trackio(monkeypatch):
    seen = []
    stand_in = SimpleNamespace(
        init=lambda **given: seen.append(given),
        log=lambda values, step: seen.append((step, values)),
        finish=lambda: None,
    )
    monkeypatch.setitem(sys.modules, "trackio", stand_in)
    cfg = load_config("tiny/luffy", {"record.trackers": [{"name": "trackio", "project": "mine"}]})
    started = start_tracker(cfg.record.trackers[0], cfg, 0)
    started.log(1, {"critic/rewards/mean": 0.5})
    started.close()
    assert seen == [{"project": "mine", "name": "tiny-luffy"}, (1, {"critic/rewards/mean": 0.5})]
