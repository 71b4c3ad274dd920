"""The own flags of each verb: what is said besides the settings of a method."""

from __future__ import annotations

import argparse


def run(parser: argparse.ArgumentParser) -> None:
    plan(parser)
    parser.add_argument("--dry-run", action="store_true", help="plan only: nothing is written but the plan")


def plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checks",
        choices=("quick", "full"),
        default="quick",
        help="full: read all rows too (a run always does)",
    )
    parser.add_argument(
        "--verify-model",
        action="store_true",
        help="digest all bytes of the weights, not their headers and sizes",
    )


def run_name(parser: argparse.ArgumentParser, optional: bool = False) -> None:
    parser.add_argument("run", nargs="?" if optional else None, metavar="RUN", help="run folder or run id")


def weights(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint", type=int, help="weights of the checkpoint at this step instead of the final ones"
    )
    parser.add_argument("--base", action="store_true", help="the model before training")


def status(parser: argparse.ArgumentParser) -> None:
    run_name(parser)
    parser.add_argument(
        "--wait",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="return when the run has ended, or after so many seconds (exit 9)",
    )


def logs(parser: argparse.ArgumentParser) -> None:
    run_name(parser)
    parser.add_argument(
        "--rank", type=int, help="log of this rank (default: rank 0, or the launcher of a single process)"
    )
    parser.add_argument(
        "--file", metavar="NAME", help="another log by its name, as vllm-0-0.log of an engine"
    )
    parser.add_argument("--grep", metavar="PATTERN", help="only lines with this regular expression")
    parser.add_argument("--offset", type=int, help="first line (default: the last lines)")
    parser.add_argument("--limit", type=int, default=50, help="lines at most")


def stop(parser: argparse.ArgumentParser) -> None:
    run_name(parser)
    parser.add_argument(
        "--grace",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="time to finish the step and save, before it is killed",
    )


def resume(parser: argparse.ArgumentParser) -> None:
    run_name(parser)
    parser.add_argument("--extend", type=int, metavar="STEPS", help="go on to so many steps in all")


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
    parser.add_argument("--max-new-tokens", type=int, default=128, help="tokens of an answer at most")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the likeliest token each time")
    parser.add_argument("--offset", type=int, default=0, help="first prompt")


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
        "--checkpoint", type=int, help="weights of the checkpoint at this step instead of the final ones"
    )


def offset(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--offset", type=int, default=0, help="first entry")


def explain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what", metavar="CODE|RUN|FILE|TEXT", help="an error code, a run, a log file, or text of an error"
    )


def skeleton(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="Python file to write")
