"""The own flags of each verb: what is said besides the settings of a method."""

from __future__ import annotations

import argparse
import math


class Number:
    """Turns the text of a flag into a number and refuses one out of bounds; the schema of a tool shows the same bounds."""

    def __init__(self, kind: type[int] | type[float], at_least: float, at_most: float = 2**31 - 1) -> None:
        self.kind, self.at_least, self.at_most = kind, at_least, at_most

    def __call__(self, text: str) -> int | float:
        try:
            value = self.kind(text)
        except ValueError:
            value = math.nan
        if not self.at_least <= value <= self.at_most:  # false for nan too
            what = "whole number" if self.kind is int else "number"
            raise argparse.ArgumentTypeError(
                f"{text[:40]!r} is no {what} from {self.at_least:g} to {self.at_most:g}"
            )
        return value


def doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quick", action="store_true", help="import no package: an answer within a second or two"
    )


def run(parser: argparse.ArgumentParser) -> None:
    plan(parser)
    parser.add_argument("--dry-run", action="store_true", help="plan only: nothing is written but the plan")
    detach(parser, "start it as `finetune start` does, and return at once")
    _consent(parser)


def start(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--plan",
        metavar="PLAN_ID",
        help="do exactly this stored plan (of `finetune plan`); no setting beside it",
    )
    _verify_model(parser)
    _consent(parser)
    parser.add_argument(
        "--new",
        action="store_true",
        help="make another run although the same plan ran before (without --out)",
    )


def _consent(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--confirm", action="store_true", help="the plan is agreed to, whatever it costs")
    parser.add_argument(
        "--yes-under",
        metavar="LIMITS",
        help="agreed to up to this expected cost, as hours=1,gpu_hours=4,disk_gb=50,generated_tokens=1e6; more needs"
        " --confirm (default: FINETUNE_YES_UNDER, else nothing does)",
    )


def detach(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--detach", action="store_true", help=text)


def plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checks",
        choices=("quick", "full"),
        default="quick",
        help="full: read all rows too (a run always does)",
    )
    _verify_model(parser)


def _verify_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--verify-model",
        action="store_true",
        help="digest all bytes of the weights, not their headers and sizes",
    )


def run_name(parser: argparse.ArgumentParser, optional: bool = False) -> None:
    parser.add_argument("run", nargs="?" if optional else None, metavar="RUN", help="run folder or run id")


def weights(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint",
        type=Number(int, 1),
        help="weights of the checkpoint at this step instead of the final ones",
    )
    parser.add_argument("--base", action="store_true", help="the model before training")


def status(parser: argparse.ArgumentParser) -> None:
    run_name(parser)
    parser.add_argument(
        "--wait",
        type=Number(float, 0, 3600),
        default=0.0,
        metavar="SECONDS",
        help="return when the run has ended, or after so many seconds (exit 9)",
    )
    parser.add_argument(
        "--since",
        type=Number(int, 0),
        metavar="EVENT",
        help="show the events after this number (0: all) as data.events; --wait returns as soon as there is one",
    )


def logs(parser: argparse.ArgumentParser) -> None:
    run_name(parser)
    parser.add_argument(
        "--rank",
        type=Number(int, 0),
        help="log of this rank (default: rank 0, or the launcher of a single process)",
    )
    parser.add_argument(
        "--file", metavar="NAME", help="another log by its name, as vllm-0-0.log of an engine"
    )
    parser.add_argument("--grep", metavar="PATTERN", help="only lines with this regular expression")
    parser.add_argument("--offset", type=Number(int, 0), help="first line (default: the last lines)")
    parser.add_argument("--limit", type=Number(int, 1, 1000), default=50, help="lines at most")


def stop(parser: argparse.ArgumentParser) -> None:
    run_name(parser)
    parser.add_argument(
        "--grace",
        type=Number(float, 0, 86400),
        default=60.0,
        metavar="SECONDS",
        help="time to finish the step and save, before it is killed",
    )


def resume(parser: argparse.ArgumentParser) -> None:
    run_name(parser)
    parser.add_argument(
        "--extend", type=Number(int, 1), metavar="STEPS", help="go on to so many steps in all"
    )
    for name, kind in (("max-hours", float), ("max-disk-gb", float), ("max-generated-tokens", int)):
        parser.add_argument(f"--{name}", type=Number(kind, 0), help="another limit than before")
    _consent(parser)
    detach(parser, "go on in a process of its own, and return at once")


def evaluate(parser: argparse.ArgumentParser) -> None:
    run_name(parser, optional=True)
    weights(parser)
    parser.add_argument("--adapter", metavar="DIR", help="PEFT adapter to evaluate, where no RUN is given")


def generate(parser: argparse.ArgumentParser) -> None:
    run_name(parser)
    weights(parser)
    parser.add_argument("--prompt", nargs="+", action="extend", help="prompts, each a user turn")
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="prompts from a file, one a line (.jsonl: texts or lists of messages)",
    )
    parser.add_argument(
        "--max-new-tokens", type=Number(int, 1, 32768), default=128, help="tokens of an answer at most"
    )
    parser.add_argument(
        "--temperature", type=Number(float, 0, 10), default=0.0, help="0: the likeliest token each time"
    )
    parser.add_argument("--offset", type=Number(int, 0), default=0, help="first prompt")


def export(parser: argparse.ArgumentParser) -> None:
    run_name(parser)
    parser.add_argument(
        "--to", metavar="DIR", help="target folder (default: merged or adapter-export in the run folder)"
    )
    parser.add_argument(
        "--kind",
        choices=("merged", "adapter"),
        default="merged",
        help="a whole model, or the adapter in PEFT form",
    )
    parser.add_argument(
        "--export-dtype",
        choices=("auto", "bf16", "fp32"),
        default="auto",
        help="stored type; auto: that of the base model",
    )
    parser.add_argument(
        "--checkpoint",
        type=Number(int, 1),
        help="weights of the checkpoint at this step instead of the final ones",
    )


def report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="+", metavar="RUN", help="run folders or run ids; several are compared")
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="HTML file to write (default: report.html in the run folder; of several comparison.html in the first)",
    )


def offset(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--offset", type=Number(int, 0), default=0, help="first entry")


def listing(parser: argparse.ArgumentParser) -> None:
    offset(parser)
    parser.add_argument("--jobs", action="store_true", help="the jobs instead of the runs")


def explain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what", metavar="CODE|RUN|FILE|TEXT", help="an error code, a run, a log file, or text of an error"
    )


def skeleton(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="Python file to write")


def skills(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("install", "list"), help="copy skill folders, or name them")
    parser.add_argument(
        "--target",
        metavar="agents|claude|DIR",
        help="where to: agents (default) is .agents/skills (Codex, OpenCode and others), claude is .claude/skills",
    )
    parser.add_argument(
        "--scope",
        choices=("project", "user"),
        help="in the working directory (default), or in the home directory",
    )
    parser.add_argument("--name", nargs="+", action="extend", help="only these skills (default: all)")
    parser.add_argument(
        "--force", action="store_true", help="replace a folder of the same name that holds something else"
    )


def serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--root",
        nargs="+",
        action="extend",
        metavar="DIR",
        help="folders that the tools may touch, in the first of which relative paths begin (default: where it is started)",
    )


def tasks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("check",), help="check: are these tasks fit to train on")
    parser.add_argument(
        "tasks",
        metavar="DIR|FILE|builtin:desk",
        help="a folder of tasks, a list of them, or the tasks that ship",
    )
    parser.add_argument(
        "--box",
        default="bubblewrap",
        help="where programs run: bubblewrap (default), container, container:podman, or process (no isolation)",
    )


def rollouts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action", choices=("audit",), help="audit: match every sampled call with what the engine served"
    )
    parser.add_argument("run", metavar="RUN", help="run folder or run id")
