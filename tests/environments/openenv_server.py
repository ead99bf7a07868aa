"""A small server of the package openenv, for an environment of its own: python openenv_server.py PORT"""

import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    message: str


class Told(Observation):
    text: str = ""


class Guessing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.right, self.turns = str(seed % 10), 0
        return Told(text=f"Guess a digit, {kwargs.get('level', 'any')}.")

    def step(self, action, **kwargs):
        if action.message == "crash":
            raise ValueError("crashed")
        self.turns += 1
        right = action.message.strip() == self.right
        return Told(text="Right." if right else "Wrong.", reward=1.0 if right else -0.5, done=right)

    @property
    def state(self):
        return State(step_count=self.turns)


if __name__ == "__main__":
    app = create_fastapi_app(Guessing, Guess, Told, max_concurrent_envs=8)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
