"""Imitate a data set, then go on with PPO: python examples/warm_start.py [ENV_STEPS]

The data are episodes of a rule that balances CartPole. Any data set of Minari's will do: `minari list remote`.
Needs the extra `minari`.
"""

import os
import sys
import tempfile

import gymnasium
import numpy as np

import coterie

DATASET = "cartpole/rule-v0"


def play(env, seed):
    """One episode of the rule, as Minari stores it."""
    from minari.data_collector.episode_buffer import EpisodeBuffer

    obs, _ = env.reset(seed=seed)
    seen, taken, rewards, ends = [obs], [], [], []
    while not (ends and any(ends[-1])):
        x, speed, angle, turning = obs
        taken.append(int(angle + 0.5 * turning + 0.02 * x + 0.05 * speed > 0))
        obs, reward, terminated, truncated, _ = env.step(taken[-1])
        seen.append(obs)
        rewards.append(reward)
        ends.append((terminated, truncated))
    terminations, truncations = (list(x) for x in zip(*ends, strict=True))
    return EpisodeBuffer(
        observations=np.array(seen),
        actions=np.array(taken),
        rewards=rewards,
        terminations=terminations,
        truncations=truncations,
    )


def collect(episodes):
    """A data set in a new folder, which Minari looks for it in from now on."""
    os.environ["MINARI_DATASETS_PATH"] = tempfile.mkdtemp()
    import minari

    env = gymnasium.make("CartPole-v1")
    minari.create_dataset_from_buffers(DATASET, [play(env, seed) for seed in range(episodes)], env="CartPole-v1")


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    collect(episodes=5)
    env = "CartPole-v1"
    cloned = coterie.train(preset="bc", env=env, steps=steps, **{"bc.dataset": DATASET})
    tuned = coterie.train(preset="ppo", env=env, steps=steps, init_from=cloned["folder"])
    for name, run in (("cloned", cloned), ("and PPO", tuned)):
        score = coterie.evaluate_run(run["folder"], episodes=20)["mean_return"]
        print(f"{name}: {score:.0f} of 500")
