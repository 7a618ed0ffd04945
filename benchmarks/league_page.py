"""docs/results/league.md, its pictures and README's table of results, from the records of benchmarks/league.py."""

from __future__ import annotations

import tomllib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from league_entries import RECORDS, ROOT, TABLE, Entry, Record, listed
from marked import replaced

from coterie.errors import counted
from coterie.tools.report.stats import band, interquartile_mean, interval, on_grid

SOURCES = tomllib.loads((Path(__file__).parent / "published.toml").read_text())["source"]
TITLES = {"mujoco": "MuJoCo"}
HEAD = """# The league

Presets with their default options on a list of environments: `python benchmarks/league.py run`. {done} of {total} runs
are done; the others, most Atari games among them, are not started or not finished. A score is the mean return of greedy
episodes with the last weights, its interquartile mean over seeds and the 95% bootstrap interval of that. Some defaults
were chosen by runs on these environments and with some of these seeds ([presets](../reference/presets.md), [what did
not learn](learning.md#what-did-not-learn)), so expect less elsewhere. [Conditions](#conditions) are at the end.

*Written by `python benchmarks/league.py page`.*
"""
CONDITIONS = """## Conditions

- Episodes of a score: vectors and continuous 100, memory 200, MuJoCo 50, Atari 30; peers 100.
- With two to four seeds the interval is their range, which has the true value in about 50%, 74% and 88% of cases (five
  seeds: about 90%; simulated with normal scores). Human = 1: the score between a random policy's (0) and a human's (1).
- Curves: mean over seeds and its 95% interval, up to the end of the first seed that was done. *In italics*: a run that
  is under way, with the return of its last 100 training episodes.
- Seconds: median wall-clock of training at idle priority on one or two cores, beside other work that differed from run
  to run, and some runs were paused: an upper bound. What was reached in the same time compares as loosely; speeds
  under equal conditions are [on another page](../benchmarks/speed.md). Machine: cores and processor, from 25 November
  2026 on, of peers from December on; "AMD EPYC" without a family may be Zen 3, 4 or 5, whose speeds differ by up to 2.
- Coterie: EnvPool, fp32 for vectors, the learners, actors and envs that a preset has on two cores, and but for the
  group "Memory" the preset's defaults. "x4" behind env steps: each repeats its action four times, and counts once.
- Rows of `sb3_league.py`: Stable-Baselines3 with its library defaults and one gymnasium env, not tuned for the task;
  one torch thread from December on.
  Coterie's presets have settings of our own for vectors, so this does not compare the two implementations. SAC has the
  same hyperparameters in both, but starts to train after 10,000 env steps in Coterie, after 100 there.
- No run was steered. The budgets of `gala-ppo` and `ppo-paper` on Pong were raised after runs of 3M env steps had ended
  at 4.9 and 17.2, and that of `appo` with them. Trained again after their defaults had changed: `dqn` on CartPole
  (before: 393), `ppo` on MountainCar (-138), `dqn` and `rainbow` on MountainCar (-148 and -100), `gala-ppo` on
  LunarLander (201), LunarLanderContinuous (212), Walker2d (1415), Hopper (2149) and HalfCheetah (1405, commit
  7facdaf7), and what is listed with older defaults [here](learning.md#what-did-not-learn). Runs on one core that would
  have had more learners or envs on two were made again with two.
"""


Group = dict[str, list[tuple[Entry, Record]]]  # of one env, by method


def command(entry: Entry) -> str:
    """Without the seed: one row has several."""
    return f"`{entry.typed.rsplit(' --seed', 1)[0]}`"


def row(*cells: object) -> str:
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def table(*names: str) -> list[str]:
    return [row(*names), row(*["---"] * len(names)).replace(" ", "")]


def finished(records: Sequence[tuple[Entry, Record]]) -> list[Record]:
    return [record for _, record in records if not record.get("unfinished")]


def machines(records: Sequence[Record]) -> str:
    """Cores, and the processor where it was recorded."""
    found = set()
    for machine in (record["machine"] for record in records):
        name = (machine.get("processor") or "").replace("(R)", "").replace(" Processor", "")
        found.add(f"{machine['cores']} x {name}" if name else counted(machine["cores"], "core"))
    return ", ".join(sorted(found))


def returns(records: Sequence[Record]) -> np.ndarray:
    return np.array([record["score"]["mean_return"] for record in records])


def middle(records: Sequence[Record], key: str) -> float:
    """The median of their env steps or seconds."""
    return float(np.median([record["seconds"] if key == "seconds" else record["curve"][-1][0] for record in records]))


def measured(strata: Sequence[np.ndarray], digits: int = 1) -> tuple[str, str]:
    """The interquartile mean and its interval, in words; "" where one run for each env allows none."""
    low, high = interval(strata)
    between = "" if np.isnan(low) else f"{low:.{digits}f} to {high:.{digits}f}"
    return f"{interquartile_mean(np.concatenate(strata)):.{digits}f}", between


def best(methods: Group, peers: bool) -> str:
    """The method with the highest score of Coterie's presets or of the peers, or all of them, and its env steps. Of
    presets, fewer than three runs count only where none has more.
    """
    found = {m: done for m, runs in methods.items() if m.startswith("sb3-") is peers and (done := finished(runs))}
    if not found:
        return ""
    scores = {method: measured([returns(done)]) for method, done in found.items()}
    some = [name for name, done in found.items() if peers or len(done) >= 3] or list(found)
    top = max(some, key=lambda name: interquartile_mean(returns(found[name])))
    first = [name for name in some if scores[name] == scores[top]]
    steps = sorted({round(found[name][0]["curve"][-1][0] / 1e6, 1) for name in first})
    score, between = scores[top]
    text = f"{', '.join(first)}: {score} ({between or counted(len(found[top]), 'run')})"
    return f"{text}; {' to '.join(f'{x}M' for x in (*steps[:1], *steps[1:][-1:]))}"


def best_published(env: str, preset: str = "") -> str:
    """The highest of the published scores, or of those of a preset's method, and its env steps."""
    found = [(float(score.split(" ")[0]), f"{method}, {source['name']}: {score}; {steps / 1e6:g}M")
             for source in SOURCES for name, method, _, steps, _, score in source["rows"]
             if name == env and (not preset or preset.upper() == method)]  # fmt: skip
    return max(found, default=(0.0, ""))[1]


def summary(found: dict[str, dict[str, Group]]) -> list[str]:
    """Runs done of all, the best of each env, and presets that have played all Atari games."""
    total: dict[tuple[str, str], int] = defaultdict(int)
    for entry in listed():
        total[entry.group, entry.env] += 1
    lines = [
        "## Summary\n",
        *table(
            "group",
            "env",
            "runs done",
            "best preset; env steps",
            "Stable-Baselines3's defaults, run here; env steps",
            "best of the published scores below; env steps",
        ),
    ]
    for (group, env), count in total.items():
        methods = found[group][env]
        done = sum(len(finished(runs)) for runs in methods.values())
        lines.append(
            row(group, env, f"{done} of {count}", best(methods, False), best(methods, True), best_published(env))
        )
    games = TABLE["groups"]["atari"]["envs"]
    every = []
    for method in TABLE["groups"]["atari"]["presets"]:
        played = [finished(found["atari"][game].get(method, [])) for game in games]
        if all(played):
            human = [np.array([record["score"]["human_normalized"] for record in records]) for records in played]
            every.append(row(method, sum(map(len, played)), *measured(human, 2)))
    if every:
        lines += ["", f"All {len(games)} Atari games, human = 1:\n"]
        lines += [*table("preset", "runs", "interquartile mean", "95% interval"), *every]
    return [*lines, ""]


def rows(methods: Group) -> list[str]:
    """An env's table: what is done, the best first, then what is under way."""
    done = {method: records for method, runs in methods.items() if (records := finished(runs))}
    lines = table(
        "command", "seeds", "env steps", "score", "interval", "lowest seed", "human = 1", "seconds", "machine"
    )
    for method in sorted(done, key=lambda name: -interquartile_mean(returns(done[name]))):
        records, first = done[method], methods[method][0][0]
        human = [x for record in records if (x := record["score"].get("human_normalized")) is not None]
        steps, seconds = (f"{middle(records, key):,.0f}" for key in ("steps", "seconds"))
        repeat = dict(first.settings or {}).get("env.action_repeat", 1)
        steps += f" (x{repeat})" if repeat > 1 else ""
        normal = f"{interquartile_mean(np.array(human)):.2f}" if human else ""
        score, lowest = measured([returns(records)]), f"{min(returns(records)):.1f}" if len(records) > 1 else ""
        lines.append(row(command(first), len(records), steps, *score, lowest, normal, seconds, machines(records)))
    for entry, record in (pair for runs in methods.values() for pair in runs):
        if record.get("unfinished") and record["curve"]:
            now, _, mean = record["curve"][-1]
            steps = f"*under way at {now:,} of {entry.steps:,}, training return {mean:.1f}*"
            lines.append(
                row(f"*{command(entry)}*", f"*seed {entry.seed}*", steps, *[""] * 4, f"*{record['seconds']}*", "")
            )
    return lines


def missing(group: str, env: str, methods: Group) -> list[str]:
    """A line with the runs of an env's table that are not done."""
    wanted: dict[str, int] = defaultdict(int)
    for entry in listed():
        wanted[entry.method] += (entry.group, entry.env) == (group, env)
    left = {name: n - len(finished(methods.get(name, []))) for name, n in wanted.items()}
    texts = [f"{name} ({n} of {wanted[name]})" for name, n in left.items() if n]
    return ["", f"Runs left: {', '.join(texts)}."] if texts else []


def paused(record: Record) -> bool:
    """Whether a run stood still between two points of its curve: for a minute, and five times as long as usual."""
    gaps = np.diff([x[1] for x in record["curve"]])
    return len(gaps) > 0 and bool(gaps.max() > max(60.0, 5 * np.median(gaps)))


def same_time(methods: Group) -> list[str]:
    """What each method had reached when the first run of a peer was done, without runs that were paused."""
    whole = {method: [x for x in finished(runs) if not paused(x)] for method, runs in methods.items()}
    done = {method: records for method, records in whole.items() if records}
    peers = {method for method in done if method.startswith("sb3-")}
    if not peers or len(peers) == len(done):
        return []
    end = min(record["seconds"] for method in peers for record in done[method])
    when = f"After {end:,} seconds, when the first run of a peer was done (or before, at a run's own end)"
    lines = ["", f"{when}; beside other work, without runs that were paused:\n"]
    lines += table("method", "seeds", "env steps", "return of training episodes", "machine")
    found = []
    for method, records in done.items():
        points = [np.array(record["curve"], float).T for record in records if record["curve"]]
        if not points or any(x[1, 0] > end for x in points):
            lines[1] = f"{lines[1][:-3]}; {method} had no episode yet):\n"
            continue
        steps, scores = (np.mean([np.interp(end, x[1], x[i]) for x in points]) for i in (0, 2))
        found.append((scores, row(method, len(records), f"{steps:,.0f}", f"{scores:.1f}", machines(records))))
    return [*lines, *(line for _, line in sorted(found, reverse=True))]


def published(env: str) -> list[str]:
    """What others have published for the env."""
    lines = []
    for source in SOURCES:
        for _, method, theirs, steps, runs, score in (r for r in source["rows"] if r[0] == env):
            lines.append(row(f"{method}, {source['name']}", theirs, f"{steps:,}", runs, score))
    head = ["", "[Published elsewhere](#published-scores):\n", *table("method", "env", "env steps", "runs", "score")]
    return [*head, *lines] if lines else []


def curves(env: str, methods: Group) -> str:
    """Draw an env's curves over env steps and over time; returns the file's name."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "league"  # the same records make the same file
    import matplotlib.pyplot as plt

    figure, both = plt.subplots(1, 2, figsize=(10, 3.4), sharey=True)
    lines = {f"{method} ({len(done)})": (done, "-") for method, runs in methods.items() if (done := finished(runs))}
    under_way = [(f"{entry.name}, under way", record) for runs in methods.values() for entry, record in runs]
    lines |= {name: ([record], "--") for name, record in under_way if record.get("unfinished")}
    for label, (records, style) in lines.items():
        for axes, column in zip(both, (0, 1), strict=True):
            data = [np.array(record["curve"], float) for record in records]
            grid, drawn = on_grid([(x[:, column], x[:, 2]) for x in data if len(x)])
            if not len(grid):
                continue
            middle, low, high = band(drawn)
            (line,) = axes.plot(grid, middle, style, label=label, linewidth=1.4)
            axes.fill_between(grid, low, high, color=line.get_color(), alpha=0.15)
    for axes, text in zip(both, ("env steps", "seconds"), strict=True):
        axes.set_xlabel(text)
        axes.grid(alpha=0.3)
    both[0].set_ylabel("return, last 100 training episodes")
    both[1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5), title="method (seeds)", title_fontsize=7)
    figure.suptitle(env, fontsize=10)
    figure.tight_layout()
    figure.savefig(RECORDS / f"{env}.svg", metadata={"Date": None})
    plt.close(figure)
    return f"{env}.svg"


def collect() -> dict[str, dict[str, Group]]:
    """The records by group, env, method and, as listed, seed."""
    found: dict[str, dict[str, Group]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for entry in listed():
        if (record := entry.record) is not None:
            found[entry.group][entry.env][entry.method].append((entry, record))
    return found


def page() -> str:
    """The page's text; the pictures are drawn beside it."""
    found = collect()
    done = [entry.done for entry in listed()]
    lines = [HEAD.format(done=sum(done), total=len(done)), *summary(found)]
    for group, listing in TABLE["groups"].items():
        lines.append(f"## {TITLES.get(group, group.capitalize())}\n")
        for env in listing["envs"]:
            methods, others = found[group][env], published(env)
            if methods or others:
                lines += [
                    f"### {env}\n",
                    *(rows(methods) if methods else ["No run yet."]),
                    *missing(group, env, methods),
                    *same_time(methods),
                    *others,
                    "",
                ]
            if methods:
                lines.append(f"![{env}: return over env steps and over seconds](league/{curves(env, methods)})\n")
    lines += [
        CONDITIONS,
        "## Published scores\n",
        "Not run here: other versions of the envs, and other ways to measure.\n",
    ]
    lines += [f"- [{source['name']}]({source['url']}): {source['note']}" for source in SOURCES]
    return "\n".join(lines) + "\n"


def readme(text: str) -> str:
    """README's text with its table of results between two comments as the records have it."""
    rows = table("environment", "command", "seeds", "env steps", "score", "published for the method; env steps")
    found = {f"{m}/{env}": runs for envs in collect().values() for env, ms in envs.items() for m, runs in ms.items()}
    for name in TABLE["readme"]:
        runs = found.get(name, [])
        if records := finished(runs):
            score, between = measured([returns(records)])
            steps = f"{middle(records, 'steps') / 1e6:.1f}M"
            score += f" ({between})" if between else ""
            method, _, env = name.partition("/")
            others = best_published(env, method)
            rows.append(row(env, command(runs[0][0]), len(records), steps, score, others))
    return replaced(text, "league", "python benchmarks/league.py page", "\n".join(rows))


def write() -> None:
    path = ROOT / "README.md"
    path.write_text(readme(path.read_text()))
    (RECORDS.parent / "league.md").write_text(page())
