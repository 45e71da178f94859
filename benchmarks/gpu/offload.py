"""What one GPU trains with host memory and a disk behind it: the offload table, case by case.

    python benchmarks/gpu/offload.py --list
    python benchmarks/gpu/offload.py plain-7b host-7b split-7b auto-7b --disk /scratch --out FOLDER
    python benchmarks/gpu/offload.py 20b --seconds 580 --disk /scratch --out FOLDER
    python benchmarks/gpu/offload.py --dry                         # every case on the CPU with a tiny model

Each case is a process of its own with a time of its own. One that fails, runs out of memory or out of time
is a row that says so, with what it had measured by then; the others go on. FOLDER/gpu-offload.json and
.md are written after every case; cases of an earlier run that are in the file stay, unless they are run
again. So a table that takes longer than one may have the machine is made in several goes.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

sys.path[:0] = [str(HERE), str(HERE.parent / "shared")]
from offload_cases import CASES, dry  # noqa: E402
from provenance import command, commit, preamble  # noqa: E402


def command_of(case, disk, scrap):
    if case.script:
        script, *words = (word.format(disk=disk) for word in case.script)
        return [sys.executable, str(HERE.parent / script), *words, str(scrap)]
    system = case.system.format(disk=disk)
    return [sys.executable, str(HERE / "one.py"), system, case.size, *case.arguments]


def measure(name, case, disk, limit, folder):
    """The row of one case, whatever becomes of it."""
    scrap = folder / f".{name}.json"
    scrap.unlink(missing_ok=True)
    row = {"case": name, "title": case.title, "bar": case.bar, "against": case.against, "limit_s": limit}
    begun, environment = time.time(), {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    process = subprocess.Popen(
        command_of(case, disk, scrap), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, env=environment,
    )  # fmt: skip
    late = False
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        late = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
    row["wall_s"] = round(time.time() - begun, 1)
    for line in out.splitlines():
        word, _, told = line.partition(" ")
        if word in ("STEP", "RESULT"):
            row |= json.loads(told)
    if case.script and scrap.exists():
        row["table"] = json.loads(scrap.read_text())
        scrap.unlink()
    if late:
        row["error"] = f"out of time after {limit:.3g} s"
    elif process.returncode:
        row["error"] = why(process.returncode, err)
    return row


def why(code, err):
    if code == -signal.SIGKILL:
        return "killed, most likely for want of host memory"
    lines = [line for line in err.strip().splitlines() if line.strip()]
    telling = [line for line in lines if "Error" in line]
    return (telling or lines or [f"exit status {code}"])[-1][:400]


# ---------------------------------------------------------------------- the table


def report(facts):
    """All rows as Markdown."""
    rows = facts["rows"]
    lines = [
        *preamble("Offload", "Llama-shaped, by row", hardware=facts["device"], commit=facts["commit"]),
        f"torch {facts['torch']}, 8 × 2048 tokens a backward or two of 4 × 2048, recomputation "
        "per block, clip_norm 1.0 unless the row says otherwise, fp32 master and moments. Medians after two "
        "steps; one process per row.",
        "",
        "| case | bar | step, s | ÷ plain | tokens/s | GPU peak, GiB | host peak, GiB | host bytes a "
        "parameter | losses |",
        "|---|---|---|---|---|---|---|---|---|",
        *(line_of(row, rows) for row in rows.values() if "table" not in row),
        "",
        *placements(rows),
        *(line for row in rows.values() if "table" in row for line in micro(row)),
    ]
    return "\n".join(lines) + "\n"


def line_of(row, rows):
    if "step_s" not in row:
        cause = row.get("error", "no result")
        return f"| {row['title']} | {row['bar']} | **{cause}** | | | | {row.get('VmHWM', '')} | | |"
    plain = rows.get(row["against"], {})
    ratio = f"{row['step_s'] / plain['step_s']:.3f}" if "step_s" in plain else "–"
    note = f" ({row['error']}; {len(row['times'])} steps)" if "error" in row else ""
    gaps = [abs(a - b) for a, b in zip(row["losses"], plain.get("losses", []), strict=False)]
    agrees = "–" if not gaps else "agree" if max(gaps) < 5e-3 else f"differ by {max(gaps):.1e}"
    each = row["VmHWM"] * 2**30 / row["params_b"] / 1e9
    return (
        f"| {row['title']} | {row['bar']} | {row['step_s']:.3f}{note} | {ratio} | {row['tok_s']:.0f} | "
        f"{row['gpu_peak_gib']:.2f} | {row['VmHWM']:.2f} | {each:.2f} | {agrees} |"
    )


def placements(rows):
    """Where things rested, how updates ran, and what was foreseen."""
    found = []
    for row in rows.values():
        stats = row.get("stats") or {}
        if not stats.get("placement"):
            continue
        foreseen, live = stats.get("foreseen", {}), stats["live"]
        host = live["host"] + live["staging"]
        parts = [f"- {row['title']}: {stats['placement']}; updates {stats['updates']}"]
        if "device" in foreseen:
            parts.append(
                f"foreseen GPU peak {foreseen['device'] / 2**30:.2f} GiB, took {row['gpu_peak_gib']:.2f}; "
                f"foreseen host {foreseen['host'] / 2**30:.2f} GiB, booked {host / 2**30:.2f}; "
                f"start {row['init_s']} s"
            )
        found.append("; ".join(parts))
    return [*found, ""] if found else []


def micro(row):
    """A table of another benchmark, as that one tells it."""
    lines, table = [f"## {row['title']} ({row['bar']})", ""], row["table"]
    lines += [table["text"]] if "text" in table else ["```", json.dumps(table, indent=1), "```"]
    return [*lines, ""]


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--dry", action="store_true", help="on the CPU with a tiny model")
    parser.add_argument("--disk", default="/tmp", help="a folder on a disk, for the disk tier")
    parser.add_argument("--out", type=Path, default=Path("offload-results"))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for all cases together")
    parser.add_argument("--commit", default=None)
    args = parser.parse_args()
    unknown = sorted(set(args.cases) - set(CASES))
    if unknown:
        parser.error(f"no case {', '.join(unknown)}; there are {', '.join(CASES)}")
    if args.list:
        for name, case in CASES.items():
            print(f"{name:12} {case.seconds:4} s  {case.title} ({case.bar})")
        return
    import torch

    args.out.mkdir(parents=True, exist_ok=True)
    name = f"{'cpu-dry' if args.dry else 'gpu'}-offload"
    target = args.out / f"{name}.json"
    earlier = json.loads(target.read_text())["rows"] if target.exists() else {}
    on_gpu = torch.cuda.is_available() and not args.dry
    facts = {
        "device": torch.cuda.get_device_name(0) if on_gpu else "CPU",
        "torch": torch.__version__,
        "commit": args.commit or commit(),
        "command": command(),
        "rows": earlier,
    }
    end = time.time() + args.seconds
    peers_need_a_gpu = [name for name, case in CASES.items() if args.dry and case.is_peer]
    for wanted in args.cases or [name for name in CASES if name not in peers_need_a_gpu]:
        case = dry(CASES[wanted]) if args.dry else CASES[wanted]
        left = end - time.time() - 5
        if left < 20:
            print(f"{wanted}: not begun, no time left", flush=True)
            continue
        row = facts["rows"][wanted] = measure(wanted, case, args.disk, min(case.seconds, left), args.out)
        print(wanted, row.get("error", "done"), row.get("step_s", ""), f"{row['wall_s']} s", flush=True)
        target.write_text(json.dumps(facts, indent=1) + "\n")
        (args.out / f"{name}.md").write_text(report(facts))
    print((args.out / f"{name}.md").read_text() if (args.out / f"{name}.md").exists() else "", flush=True)


if __name__ == "__main__":
    main()
