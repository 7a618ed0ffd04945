"""Draw README's moving pictures: a run's live display, and an episode of what it learned.

    python benchmarks/pictures.py [--out docs/start/pictures]

It trains LunarLander as `make train` does, in a terminal of its own whose text it draws.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path
from typing import Any

import imageio.v3 as imageio
import matplotlib as mpl
import numpy as np
import pyte
from PIL import Image, ImageDraw, ImageFont

COLUMNS, ROWS, SIZE = 92, 14, 15
BACKGROUND, TEXT, COLORS = "#14181d", "#d5dbe1", {"green": "#7fd48a", "cyan": "#6cc3d8", "magenta": "#d382c0"}
TRAIN = ["ppo", "--env", "LunarLander-v3", "--learners", "2"]
FRAME_S = 2.0  # of training between two frames of the display


def draw(screen: pyte.Screen, font: Any) -> Image.Image:
    width, height = round(font.getlength("x")), SIZE + 5
    image = Image.new("RGB", (COLUMNS * width + 16, ROWS * height + 12), BACKGROUND)
    pen = ImageDraw.Draw(image)
    for y in range(ROWS):
        for x in range(COLUMNS):
            cell = screen.buffer[y][x]
            if cell.data.strip():
                pen.text((8 + x * width, 6 + y * height), cell.data, COLORS.get(cell.fg, TEXT), font)
    return image


def record(command: list[str], font: Any) -> list[Image.Image]:
    """The screen of a terminal in which `command` runs, every `FRAME_S` seconds."""
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    frames, due = [], time.monotonic() + FRAME_S
    while True:
        if select.select([ours], [], [], 0.1)[0]:
            try:
                stream.feed(os.read(ours, 65536))
            except OSError:  # the command has ended
                break
        if time.monotonic() >= due:
            frames.append(draw(screen, font))
            due += FRAME_S
    if process.wait():
        raise SystemExit(f"{' '.join(command)} failed")
    return [*frames, *[draw(screen, font)] * 6]


def save(path: Path, frames: list[Image.Image], milliseconds: int) -> None:
    first, *rest = [frame.quantize(32, dither=Image.Dither.NONE) for frame in frames]
    first.save(path, save_all=True, append_images=rest, duration=milliseconds, loop=0, optimize=True)
    print(f"{path}: {len(frames)} frames, {path.stat().st_size / 1000:.0f} kB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs" / "start" / "pictures")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    font = ImageFont.truetype(str(Path(mpl.get_data_path()) / "fonts" / "ttf" / "DejaVuSansMono.ttf"), SIZE)
    coterie = [sys.executable, "-m", "coterie"]
    with tempfile.TemporaryDirectory() as folder:
        run = str(Path(folder) / "run")
        save(out / "display.gif", record([*coterie, "train", *TRAIN, "--out", run], font), 250)
        video = Path(folder) / "episode.mp4"
        subprocess.run([*coterie, "watch", run, "--out", str(video)], check=True)
        frames = [Image.fromarray(np.asarray(frame)).resize((300, 200)) for frame in imageio.imiter(video)]
    save(out / "episode.gif", frames[::3], 60)


if __name__ == "__main__":
    main()
