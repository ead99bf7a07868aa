from dataclasses import dataclass

from luffy.api import knob, tracker


@dataclass(frozen=True)
class Trackio:
    project: str = knob("luffy", "Trackio project")


@tracker("trackio", settings=Trackio, package="trackio")
class TrackioTracker:
    def __init__(self, cfg, start_step, settings):
        import trackio

        self.trackio = trackio
        trackio.init(project=settings.project, name=cfg.name)

    def log(self, step, values):
        self.trackio.log(dict(values), step=step)

    def close(self):
        self.trackio.finish()
