"""A user's code, for mypy (pyproject.toml): an error that is not found is a comment too many. It is never run."""

import coterie

coterie.trian(env="CartPole-v1")  # type: ignore[attr-defined]
coterie.presets.pppo("CartPole-v1")  # type: ignore[attr-defined]
coterie.train(preset=coterie.presets.ppo)
policy = coterie.load("run", model={"torso": dict}, env={"kwargs": {"level": 3}})
policy.reset([True])
