"""The planner against the machine: predicted and measured device peak, host peak and step time.

    python benchmarks/gpu/plan_error.py                          # as many cases as fit into nine minutes
    python benchmarks/gpu/plan_error.py                          # the rest: it goes on where it stopped
    python benchmarks/gpu/plan_error.py --sizes 1b --worlds 8    # a part of them
    python benchmarks/gpu/plan_error.py --device cpu --sizes tiny --worlds 1 4 --seq 32 --steps 1

Cases: sizes × stages × recomputation × offload on one rank, and one rank of simulated worlds (a fake process
group, real computation and memory; nothing is sent, and their steps are predicted for links that take no
time; with --brief they are not compared). The micro-batch is the largest of --rows that is predicted to fit.
After every case the JSON and the Markdown beside it are written anew: a run that is cut off loses one case.
"""

import argparse
import itertools
import json
import re
import select
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "shared"))
from provenance import RESULTS, command, commit, hardware, preamble, version  # noqa: E402

GIB = 2**30
BARS = {"device": 0.03, "host": 0.03, "step": 0.15}
GOAL = 0.01  # of the device
FEW = 64 * 2**20  # bytes of host memory; a process of over 1 GiB varies by some MiB of its own
APART = 1.10  # two step times that differ by more are a pair to rank
KEY = ("size", "world", "stage", "recompute", "offload")


def cases(args):
    for size, world in itertools.product(args.sizes, args.worlds):
        for stage, recompute, offload in itertools.product(args.stages, args.recompute, args.offload):
            yield {
                "size": size,
                "world": world,
                "stage": stage,
                "recompute": recompute == "yes",
                "offload": offload,
                "rows": args.rows,
                "seq": args.seq,
                "steps": args.steps,
                "brief": args.brief,
                "details": args.details,
            }


def key(case):
    return tuple(case[name] for name in KEY)


class Worker:
    """A process that measures the cases of one size and world, one after another."""

    def __init__(self, world, device):
        command = [sys.executable, str(HERE / "plan_one.py"), "--world", str(world), "--device", device]
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True
        )

    def measure(self, case, timeout):
        """The case's result; an error where the process died or took too long."""
        end = time.monotonic() + timeout
        try:
            self.process.stdin.write(json.dumps(case) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return case | {"error": "the measuring process has ended"}
        while time.monotonic() < end:
            if select.select([self.process.stdout], [], [], 1.0)[0]:
                line = self.process.stdout.readline()
                if not line:
                    return case | {"error": f"the measuring process ended: {self._last_words()}"}
                if line.startswith("RESULT "):
                    return json.loads(line[len("RESULT ") :])
        self.stop()
        return case | {"error": f"took more than {timeout:.0f} s"}

    def _last_words(self):
        self.errors.seek(0)
        lines = self.errors.read().strip().splitlines()
        return lines[-1][:300] if lines else "no word"

    def stop(self):
        self.process.stdin.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.errors.close()


# ---------------------------------------------------------------------- what the rows say


def error(row, what):
    """How far the prediction is off, as a share of what was measured; None where there is nothing."""
    if "measured" not in row or (what == "step" and not timed(row)):
        return None
    if what == "host" and (row["offload"] == "none" or row["predicted"]["host"] < FEW):
        return None  # nothing of ours is there, or too little to be seen
    real = was(row, what)
    return row["predicted"][what] / real - 1 if real else None


def timed(row):
    """Whether its step is one to compare: a simulated world's only if it was predicted for links that take no
    time, and reached its steady state."""
    return row["world"] == 1 or ("warm_up" in row["measured"] and row["machine"]["latency"] == 0)


def was(row, what):
    """What was measured; of steps the median of the means of neighbours: an overlapped update moves time from
    one into the next, and others on the machine disturb single ones."""
    steps = row["measured"].get("steps", [])
    if what != "step" or len(steps) < 2:
        return row["measured"][what]
    return statistics.median((one + two) / 2 for one, two in itertools.pairwise(steps))


def way(row):
    """What makes two cases different runs: on one rank all stages are the same."""
    return row["stage"] if row["world"] > 1 else None, row["recompute"], row["offload"]


def ranked(rows):
    """Pairs of the same model, world and batch whose measured steps differ by over 10 %: how many are
    predicted in the right order, of how many."""
    compared = [row for row in rows if error(row, "step") is not None]
    right = pairs = 0
    for a, b in itertools.combinations(compared, 2):
        if any(a[name] != b[name] for name in ("size", "world", "rows")) or way(a) == way(b):
            continue
        one, two = sorted((a, b), key=lambda row: was(row, "step"))
        if was(two, "step") > APART * was(one, "step"):
            pairs += 1
            right += two["predicted"]["step"] > one["predicted"]["step"]
    return right, pairs


def summary(rows):
    lines = []
    for what, bar in BARS.items():
        errors = [abs(e) for row in rows if (e := error(row, what)) is not None]
        if errors:
            good = sum(e <= bar for e in errors)
            line = f"- {what}: {good} of {len(errors)} within {bar:.0%}, worst {max(errors):.1%}"
            if what == "device":
                line += f"; {sum(e <= GOAL for e in errors)} within {GOAL:.0%}"
            lines.append(line)
    few = [r for r in rows if "measured" in r and r["offload"] != "none" and r["predicted"]["host"] < FEW]
    if few:
        most = max(abs(r["predicted"]["host"] - was(r, "host")) for r in few) / 2**20
        lines.append(f"- host under {FEW >> 20} MiB: {len(few)} cases, off by at most {most:.0f} MiB")
    right, pairs = ranked(rows)
    if pairs:
        lines.append(f"- ranking: {right} of {pairs} pairs that differ by over 10 % ({right / pairs:.0%})")
    failed = sum("error" in row for row in rows)
    skipped = sum("skipped" in row for row in rows)
    lines.append(f"- {len(rows)} cases; {skipped} predicted not to fit and not run, {failed} failed")
    return lines


def table(rows):
    lines = [
        "| model | ranks | stage | recompute | offload | rows | device GiB: said / was | off | reserved | "
        "host GiB: said / was | off | step s: said / was | off |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda r: (r["world"], str(r["size"]), r["stage"], r["recompute"])):
        names = [row["size"], row["world"], row["stage"], "yes" if row["recompute"] else "no", row["offload"]]
        head = " | ".join(map(str, names))
        if "measured" not in row:
            why = row.get("skipped") or row.get("error")
            lines.append(f"| {head} | – | {why} | | | | | | |")
            continue
        said = row["predicted"]

        def pair(what, scale, digits, row=row, said=said):
            return f"{said[what] / scale:.{digits}f} / {was(row, what) / scale:.{digits}f}"

        def off(what, row=row):
            found = error(row, what)
            return "–" if found is None else f"{found:+.1%}"

        digits = 2 if was(row, "device") > GIB / 10 else 4
        lines.append(
            f"| {head} | {row['rows']} | {pair('device', GIB, digits)} | {off('device')} | "
            f"{was(row, 'reserved') / GIB:.{digits}f} | {pair('host', GIB, digits)} | {off('host')} | "
            f"{pair('step', 1, 3)} | {off('step')} |"
        )
    return lines


def steadiness(rows):
    """How the step times of these rows were taken, as a paragraph."""
    steady = sum("warm_up" in row.get("measured", {}) for row in rows)
    line = (
        f"Step times of {steady} of {len(rows)} rows are of the steady state: after at least two steps, with "
        "offload after two whose updates began in backward, for at least 1.5 s; the median of the means of "
        "neighbours."
    )
    others = " The others are steps after two." if steady < len(rows) else ""
    return [line + others, ""] if steady else []


def commits(rows):
    """Of which sources these rows are, shortened."""
    return ", ".join(dict.fromkeys(re.sub(r"^(\w{7})\w*", r"\1", row["commit"]) for row in rows))


def write(path, facts, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    facts = facts | {"commit": commits(rows)}
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n", encoding="utf-8")
    draft.replace(path)
    sizes = dict.fromkeys(str(row["size"]) for row in rows)
    text = [
        *preamble(
            f"The planner against {facts['device']}",
            f"Llama-shaped, {', '.join(sizes)}",
            hardware=facts["device"],
            commit=facts["commit"],
            command=facts["command"],
        ),
        f"torch {facts['torch']}. Llama-shaped, bf16 with "
        f"fp32 master and AdamW, {facts['seq']} tokens a row. Device: the allocator's most allocated bytes; "
        "host: resident memory over what the process had before. Worlds of more than one rank are simulated: "
        "nothing is sent, and their steps are predicted for links that take no time.",
        "",
        *([facts["note"], ""] if facts.get("note") else []),
        *steadiness(rows),
        *summary(rows),
        "",
        *table(rows),
    ]
    path.with_suffix(".md").write_text("\n".join(text) + "\n", encoding="utf-8")


def parsed(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["0.4b", "1b", "3b", "7b"])
    parser.add_argument("--worlds", nargs="+", type=int, default=[1, 8, 64, 1024])
    parser.add_argument("--stages", nargs="+", type=int, default=[0, 1, 2, 3])
    parser.add_argument("--recompute", nargs="+", default=["yes", "no"], choices=["yes", "no"])
    parser.add_argument("--offload", nargs="+", default=["none", "host", "auto"])
    parser.add_argument("--rows", nargs="+", type=int, default=[8, 4, 2, 1])
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=4, help="at least, after some to warm up")
    parser.add_argument("--brief", action="store_true", help="for memory: no steady state, no details")
    parser.add_argument("--details", action="store_true", help="also where memory is at its peak, and phases")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--budget", type=float, default=540, help="seconds; no case begins after them")
    parser.add_argument("--case-seconds", type=float, default=120, help="a case that takes longer is ended")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--again", action="store_true", help="measure what the file has already")
    parser.add_argument("--commit", help="of these sources, where they are no checkout of git")
    return parser.parse_args(argv)


def main(argv=None):
    args, begun = parsed(argv), time.monotonic()
    import torch

    name = torch.cuda.get_device_name(0) if args.device == "cuda" else hardware()
    path = args.out or RESULTS / f"{args.device}-plan-error.json"
    known = json.loads(path.read_text())["rows"] if path.exists() and not args.again else []
    rows, source = {key(row): row for row in known}, args.commit or commit()
    facts = {
        "device": name,
        "torch": version("torch"),
        "command": command(),
        "seq": args.seq,
    }
    left = [case for case in cases(args) if "measured" not in rows.get(key(case), {}) or args.again]
    left = [case for case in left if "skipped" not in rows.get(key(case), {}) or args.again]
    worker, at = None, None
    for number, case in enumerate(left):
        spare = args.budget - (time.monotonic() - begun)
        if spare < 5:
            print(f"{len(left) - number} cases are left: start it again", flush=True)
            break
        if worker is None or at != (case["size"], case["world"]) or worker.process.poll() is not None:
            if worker is not None:
                worker.stop()
            worker, at = Worker(case["world"], args.device), (case["size"], case["world"])
        row = worker.measure(case, min(args.case_seconds, spare + 45)) | {"commit": source}
        rows[key(case)] = row
        write(path, facts, list(rows.values()))
        said = {what: f"{e:+.1%}" for what in BARS if (e := error(row, what)) is not None}
        took = row.get("wall_s", "?")
        print(*key(case), row.get("error") or row.get("skipped") or said, f"{took} s", flush=True)
    if worker is not None:
        worker.stop()
    print("\n".join(summary(list(rows.values()))), f"\n{path}", flush=True)


if __name__ == "__main__":
    main()
