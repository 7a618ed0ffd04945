"""A simulator of your own behind Coterie, with Brax as the one: python examples/brax_env.py [ENV_STEPS] [BRAX_ENV]

Needs the extra `brax`. Or by name, from the folder examples: coterie train ppo --env.backend brax_env:Brax --env ant
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from brax import envs
from gymnasium.spaces import Box

import coterie
from coterie.envs.backend import Backend, StepResults, declare


class Brax(Backend):
    """All instances are one state on JAX's device. Observations and actions never leave it."""

    tensors = True

    def __init__(self, env_id, seeds, max_episode_steps=1000, **kwargs):
        n = len(seeds)
        env = envs.create(env_id, max_episode_steps, auto_reset=False, batch_size=n, **kwargs)
        spaces = Box(-np.inf, np.inf, (env.observation_size,)), Box(-1, 1, (env.action_size,))
        super().__init__(declare(env_id, *spaces, max_episode_steps=max_episode_steps), n)
        self.key = jax.random.PRNGKey(seeds[0])

        def step(state, actions, key):
            """The next state; of instances that have finished, a first one."""
            finished = state.done > 0
            after = env.step(state, actions)
            fresh = jax.lax.cond(finished.any(), env.reset, lambda key: after, key)
            return jax.tree.map(lambda x, y: jnp.where(finished.reshape(n, *[1] * (x.ndim - 1)), x, y), fresh, after)

        self._reset, self._step = jax.jit(env.reset), jax.jit(step)

    def reset(self, ids):
        self.state = self._reset(self.key)

    def step(self, ids, actions):
        self.key, key = jax.random.split(self.key)
        self.state = self._step(self.state, jax.dlpack.from_dlpack(actions), key)

    def recv(self):
        done, truncated = self.state.done > 0, self.state.info["truncation"] > 0
        return StepResults(self.state.obs, self.state.reward, done & ~truncated, truncated, done)


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    env_id = sys.argv[2] if len(sys.argv) > 2 else "inverted_pendulum"
    settings = {"env.backend": Brax, "env.num_envs": 256, "algo.unroll_length": 16, "eval.every": 0}
    summary = coterie.train(env=env_id, preset="ppo", steps=steps, **settings)
    print(f"{summary['folder']}: mean return {summary['mean_return']:.1f}")
