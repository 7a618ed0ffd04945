"""Callbacks for early stopping, custom metrics, a curriculum and videos: python examples/callbacks.py [ENV_STEPS]

Or by name, from the folder examples: coterie train ppo --env callbacks:Corridor --callbacks callbacks:Curriculum
Videos need the extra `video`.
"""

import os
import subprocess
import sys

import gymnasium
import numpy as np

import coterie

LONGEST = 12


class Corridor(gymnasium.Env):
    """Walk to the door: 1 for arriving, a little less for each step. Callbacks set `door`, the distance to it."""

    def __init__(self):
        self.door = LONGEST  # as an evaluation plays it
        self.observation_space = gymnasium.spaces.Box(0.0, 1.0, (2, LONGEST + 1), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)  # back, forward

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at, self.steps, self.goal = 0, 0, self.door  # a door that moves does so between episodes
        return self.look(), {}

    def step(self, action):
        self.at, self.steps = max(0, self.at + (1 if action == 1 else -1)), self.steps + 1
        arrived = self.at == self.goal
        return self.look(), 1.0 * arrived - 0.01, arrived, self.steps == 50, {}

    def look(self):
        return np.eye(LONGEST + 1, dtype=np.float32)[[self.at, self.goal]]

    def render(self):
        frame = np.zeros((16, 16 * (LONGEST + 1), 3), np.uint8)
        frame[:, 16 * self.goal : 16 * self.goal + 16] = (0, 120, 0)
        frame[:, 16 * self.at : 16 * self.at + 16] = 255
        return frame


class EarlyStop(coterie.Callback):
    """Ends the run when the mean return of an evaluation reaches a goal."""

    def __init__(self, goal=0.8):
        self.goal, self.score = goal, -np.inf

    def on_evaluation(self, run, scores):
        self.score = scores.mean

    def should_stop(self, run):
        return f"an evaluation reached {self.score:.2f}" if self.score >= self.goal else False


class Weights(coterie.Callback):
    """Records a metric of its own, and logs a line at each evaluation."""

    def on_rollout(self, run):
        run.record("weights", sum(p.square().sum().item() for p in run.model.parameters()) ** 0.5)

    def on_evaluation(self, run, scores):
        run.log(f"{run.env_steps:,} env steps: {scores.mean:.2f} +- {scores.stderr:.2f}")


class Curriculum(coterie.Callback):
    """Begins with a near door, and moves it away whenever the mean return shows that it is found."""

    def on_start(self, run):
        self.move(run, int(run.metrics.get("custom/door", 2)))  # a resumed run goes on where it was

    def on_rollout(self, run):
        if run.env_steps >= self.next and run.metrics.get("mean_return", -1.0) > 0.7 and self.door < LONGEST:
            self.move(run, self.door + 1)

    def move(self, run, door):
        self.door, self.next = door, run.env_steps + 1000  # until its episodes show in the mean return
        run.set_env("door", door)
        run.record("door", door)


class Video(coterie.Callback):
    """Records an episode with `coterie watch` at the first checkpoint after every `every` env steps."""

    def __init__(self, every=10_000):
        self.every, self.next, self.recorders = every, 0, []

    def on_checkpoint(self, run, folder):
        if run.env_steps >= self.next:
            self.next = run.env_steps + self.every
            video = run.folder / f"video-{run.env_steps}.mp4"
            command = [sys.executable, "-m", "coterie", "watch", str(run.folder), "--out", str(video)]
            env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
            self.recorders.append(subprocess.Popen(command, env=env))  # training goes on meanwhile

    def on_end(self, run):
        for recorder in self.recorders:
            recorder.wait()


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 60_000
    settings = {"eval.every": 5_000, "log.every": 0.2, "env.num_envs": 8, "algo.unroll_length": 32}
    settings |= {"ppo.batch_size": 0, "ppo.minibatch_size": 64}
    ours = [EarlyStop(), Weights(), Curriculum(), Video()]
    summary = coterie.train(env=Corridor, preset="ppo", steps=steps, callbacks=ours, **settings)
    print(f"{summary['folder']}: {summary['reason'] or 'all env steps used'}")
