"""`coterie watch`: record an episode of a run's policy as an mp4, from the env's own frames."""

from __future__ import annotations

import math
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from coterie.build.evaluate import Player
from coterie.build.policy import load
from coterie.envs.make import make_rendered
from coterie.envs.tasks import evaluation_env, task_config, tasks
from coterie.errors import ConfigError, CoterieError, reason_of
from coterie.extras import needs
from coterie.plugins import NameOrObject, in_one_line, label
from coterie.runs.files import discard, unlinked

_VIDEOS = (".mp4", ".gif", ".avi", ".mkv", ".mov")
_FPS = 30
_MOST_FRAMES = 27_000


def watch(
    folder: str | Path, out: str = "", *, sampled: bool = False, seed: int = 1, learner: str = "0", trust: bool = False,
    **new: NameOrObject,
) -> tuple[Path, float, int]:  # fmt: skip
    """Record an episode; returns the file, the episode's return (its agents' mean) and the number of frames.
    `trust` and `new`: as for `load`.
    """
    with needs("watch", "video"):
        import imageio
    policy = load(folder, learner, trust=trust, **new)
    path = Path(out) if out else unlinked(policy.folder / "watch.mp4")
    draft = unlinked(path.parent / f".{path.name}")
    if path.is_dir():
        raise ConfigError(f"--out: {path} is a folder")
    if path.suffix.lower() not in _VIDEOS:
        raise ConfigError(f"--out: {path} must end in .mp4 or .gif")
    first = tasks(policy.config.env.id)[0]
    config = task_config(policy.config, first)  # the first of several tasks
    frames, playing = 0, partial(in_one_line, f"the episode of {label(first)}")
    envs, render = make_rendered(evaluation_env(config), config.atari, seed=seed, union=first != policy.config.env.id)
    with envs:
        player = Player(policy.algorithm, policy.model, envs.spec, envs.num_envs, seed)
        returns = np.full(envs.num_envs, np.nan)
        with playing():
            ts = envs.recv(0)
        try:
            draft.touch()
            fps = max(1, round(60 / envs.spec.action_repeat)) if envs.spec.action_repeat > 1 else _FPS
            with imageio.get_writer(draft, fps=fps, macro_block_size=2) as video:
                while frames < _MOST_FRAMES:
                    with playing():
                        frame = _even(render())
                    video.append_data(frame)
                    frames += 1
                    returns = np.where(np.isnan(returns), ts.episode_return, returns)
                    if not np.isnan(returns).any():
                        break
                    with playing():
                        envs.send(0, player.act(ts.obs, ts.is_first, ts.reward, sampled))
                        ts = envs.recv(0)
            by_ffmpeg = type(video).__module__.endswith(".ffmpeg")  # imageio does not say that it failed
            if by_ffmpeg and not _is_whole(draft, frames):
                raise OSError("the video is not whole; the disk may be full")
            draft.rename(path)
        except (OSError, ValueError) as error:
            reason = reason_of(error).partition(" FFMPEG COMMAND")[0]
            raise ConfigError(f"--out: cannot write {path}: {reason}") from None
        finally:
            discard(path.parent, draft.name)
    if math.isnan(score := float(returns.mean())):
        raise CoterieError(f"the episode did not end within {_MOST_FRAMES} frames; {path} has its beginning")
    return path, score, frames


def _is_whole(path: Path, frames: int) -> bool:
    """Whether a video of ffmpeg has these frames."""
    from imageio_ffmpeg import count_frames_and_secs

    with suppress(OSError, RuntimeError, ValueError):
        return bool(count_frames_and_secs(str(path))[0] == frames)
    return False


def _even(frame: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The frame cut to even sides, which the codec needs."""
    return frame[: frame.shape[0] // 2 * 2, : frame.shape[1] // 2 * 2]
