"""The `fsdpbench` command: options in, exit code out. Everything heavy is imported on use.

Exit codes: 0 fine; 1 the input or the environment is wrong; 2 usage; 5 a trial failed; 130 stopped
by Ctrl-C or SIGTERM, with everything measured so far kept.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

from fsdpbench.bench.arguments import parse_path, parse_text
from fsdpbench.bench.entry_point import EXIT_USER_ERROR, run_command

if TYPE_CHECKING:
    from rich.console import Console

    from fsdpbench.bench.folders import RunFolder
    from fsdpbench.bench.invocation import SweepOptions
    from fsdpbench.bench.runner import SweepResult
    from fsdpbench.bench.sweep import SweepPlan
    from fsdpbench.bench.sync_command import SyncOptions

STOPPING = "ending the running trial; finished trials are kept (a sweep continues with --resume)"

app = typer.Typer(
    name="fsdpbench",
    help="Measure FSDP2 training configurations, and keep what was measured.",
    epilog="Exit codes: 0 fine, 1 the input or the environment is wrong, 2 usage, "
    "5 a trial failed, 130 stopped by Ctrl-C. Under --json errors are JSON too.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def sweep(
    space: Annotated[
        Path | None,
        typer.Argument(
            help="YAML file that describes the sweep (docs/sweep.md).",
            metavar="SPACE",
            parser=parse_path,
        ),
    ] = None,
    axis: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=a,b: values of one axis; may be repeated.",
            metavar="NAME=A,B",
            parser=parse_text,
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            help="Ready-made space: quick (default), mesh or memory.",
            metavar="NAME",
            parser=parse_text,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Model preset or local Hugging Face folder.", metavar="NAME", parser=parse_text
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="JSONL or text file to train on; default: bundled text.",
            metavar="FILE",
            parser=parse_path,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Run folder; default: a new one under runs/.", metavar="FOLDER", parser=parse_path
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue --out, or the newest run under runs/.")
    ] = False,
    timeout: Annotated[
        float | None, typer.Option(help="Limit of one trial in seconds, start-up included.")
    ] = None,
    hang_timeout: Annotated[
        float | None, typer.Option(help="Seconds without a heartbeat after which a trial hangs.")
    ] = None,
    world_size: Annotated[
        int | None, typer.Option(help="Processes at most; default: one per GPU, or 2 on a CPU.")
    ] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"] | None, typer.Option(help="Where the trials run.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of the ranking.")
    ] = False,
) -> None:
    """Measure every point of a space, each in processes of its own, and rank them."""
    from fsdpbench.bench.invocation import SweepOptions

    options = SweepOptions(
        space=space,
        axes=axis or [],
        preset=preset,
        model=model,
        data=data,
        out=out,
        resume=resume,
        timeout_seconds=timeout,
        hang_seconds=hang_timeout,
        world_size=world_size,
        device=device,
    )
    raise typer.Exit(_sweep(options, as_json))


def _sweep(options: SweepOptions, as_json: bool) -> int:
    """Plan, run and show a sweep; return the exit code."""
    from rich.console import Console

    from fsdpbench.bench.environment import list_gpus
    from fsdpbench.bench.invocation import choose_run_folder, resolve_space
    from fsdpbench.bench.sweep import plan_sweep

    console = Console(stderr=True)
    folder = choose_run_folder(options)
    plan = plan_sweep(resolve_space(options, folder), len(list_gpus()[0]))
    _show_plan(plan, folder, console)
    result = _run(plan, folder, options.resume, console)
    for problem in result.problems:
        console.print(problem, style="yellow", markup=False, soft_wrap=True)
    _show_result(plan, folder, result, as_json)
    return EXIT_USER_ERROR if plan.num_valid == 0 else result.exit_code


def _show_plan(plan: SweepPlan, folder: RunFolder, console: Console) -> None:
    what = "GPUs" if plan.device == "cuda" else "CPU processes"
    text = f"{plan.model} on up to {plan.world_size} {what}: {len(plan.points)} points"
    if plan.num_duplicates:
        text += f" ({plan.num_duplicates} more were the same as another)"
    console.print(f"{text} -> {folder.path}", markup=False, highlight=False, soft_wrap=True)


def _run(plan: SweepPlan, folder: RunFolder, resume: bool, console: Console) -> SweepResult:
    import os

    from fsdpbench.bench.command import build_command
    from fsdpbench.bench.environment import describe_environment, read_revision
    from fsdpbench.bench.progress import ProgressDisplay
    from fsdpbench.bench.runner import Harness, run_sweep
    from fsdpbench.bench.stop import StopFlag
    from fsdpbench.diagnose.explain import explain_run_for_record

    num_cpus = len(os.sched_getaffinity(0))
    with StopFlag(lambda: console.print(STOPPING, style="yellow")) as stop:
        harness = Harness(
            build_command=lambda spec, trial: build_command(spec, trial, os.environ, num_cpus),
            observer=ProgressDisplay(console),
            stop=stop,
            on_failure=explain_run_for_record,
            environment=describe_environment(),
            revision=read_revision(),
            argv=sys.argv,
        )
        return run_sweep(plan, folder, harness, resume=resume)


def _show_result(plan: SweepPlan, folder: RunFolder, result: SweepResult, as_json: bool) -> None:
    from rich.console import Console

    from fsdpbench.bench.json_text import parse_json
    from fsdpbench.bench.records import encode
    from fsdpbench.reports.cli import write_reports
    from fsdpbench.reports.run import load_run
    from fsdpbench.reports.terminal import print_ranking

    files = write_reports(load_run(folder.path))
    if as_json:
        content = {
            "run": str(folder.path),
            "interrupted": result.interrupted,
            "num_points": len(plan.points),
            "report": str(files.html),
            "records": [parse_json(encode(record)) for record in result.records],
        }
        typer.echo(json.dumps(content))
        return
    print_ranking(result.records, Console())
    typer.echo(f"results: {folder.results_path}\nreport:  {files.html}")


@app.command()
def sync(
    model: Annotated[
        str | None,
        typer.Option(
            help="Model preset or local Hugging Face folder.", metavar="NAME", parser=parse_text
        ),
    ] = None,
    parallel: Annotated[
        str, typer.Option(help="The trainer's mesh.", metavar="BACKEND", parser=parse_text)
    ] = "fsdp:d1",
    mode: Annotated[
        Literal["xccl", "disk"],
        typer.Option(help="Broadcast through a process group, or through a folder."),
    ] = "xccl",
    receivers: Annotated[
        int, typer.Option(help="Rollout processes, each on a GPU of its own if there are enough.")
    ] = 1,
    bucket_mb: Annotated[int, typer.Option(help="MiB of a bucket on the wire.")] = 1024,
    rounds: Annotated[
        int, typer.Option(help="Updates that count, behind a cold one and a warm-up one.")
    ] = 5,
    verify: Annotated[
        bool, typer.Option(help="Compare checksums of all tensors and log-probs.")
    ] = True,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="Where trainer and receivers run.")
    ] = "auto",
    timeout: Annotated[
        float | None, typer.Option(help="Limit of the trial in seconds, start-up included.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Run folder; default: a new one under runs/.", metavar="FOLDER", parser=parse_path
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of the table.")
    ] = False,
) -> None:
    """Measure weight updates from a trainer to rollout processes, each in processes of its own."""
    from fsdpbench.bench.sync_command import SyncOptions

    options = SyncOptions(
        model=model,
        parallel=parallel,
        mode=mode,
        receivers=receivers,
        bucket_mb=bucket_mb,
        rounds=rounds,
        verify=verify,
        device=device,
        timeout_seconds=timeout,
        out=out,
    )
    raise typer.Exit(_sync(options, as_json))


def _sync(options: SyncOptions, as_json: bool) -> int:
    """Plan, run and show one trial of weight updates; return the exit code."""
    from rich.console import Console

    from fsdpbench.bench.environment import list_gpus
    from fsdpbench.bench.invocation import choose_run_folder
    from fsdpbench.bench.sweep import plan_sweep
    from fsdpbench.bench.sync_command import build_answer, build_space, check_plan
    from fsdpbench.reports.terminal import print_ranking

    plan = plan_sweep(build_space(options), len(list_gpus()[0]))
    check_plan(plan)
    folder = choose_run_folder(options.folder_options)
    result = _run(plan, folder, False, Console(stderr=True))
    if as_json:
        record = result.records[0] if result.records else None
        typer.echo(json.dumps(build_answer(folder.path, record)))
    else:
        print_ranking(result.records, Console())
        typer.echo(f"results: {folder.results_path}")
    return result.exit_code


@app.command()
def report(
    run: Annotated[
        Path, typer.Argument(help="Run folder of a sweep.", metavar="RUN", parser=parse_path)
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the reports; default: the run folder.",
            metavar="FOLDER",
            parser=parse_path,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of the ranking.")
    ] = False,
    open_page: Annotated[
        bool, typer.Option("--open", help="Open the page in the browser.")
    ] = False,
) -> None:
    """Write RUN/report.html and RUN/report.md, and print the ranking."""
    from fsdpbench.reports.cli import report as write_report

    write_report(run, out, as_json)
    if open_page:
        typer.launch(str((out or run) / "report.html"))


@app.command()
def export(
    run: Annotated[
        Path, typer.Argument(help="Run folder of a sweep.", metavar="RUN", parser=parse_path)
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="File to write; default: RUN/results.parquet.", metavar="FILE", parser=parse_path
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of the file's name.")
    ] = False,
) -> None:
    """Write a run's records as one flat Parquet table."""
    from fsdpbench.bench.folders import RunFolder
    from fsdpbench.bench.parquet import save_parquet
    from fsdpbench.bench.store import StoreError, keep_latest, read_records

    results = RunFolder(run).results_path
    read = read_records(results)
    if not read.records:
        raise StoreError(f"{results}: holds no records; give the folder that a sweep printed")
    for problem in read.problems:
        typer.echo(problem, err=True)
    path = out or run / "results.parquet"
    records = keep_latest(read.records)
    save_parquet(records, path)
    written = {"parquet": str(path), "num_records": len(records), "problems": read.problems}
    typer.echo(json.dumps(written) if as_json else path)


def main() -> NoReturn:
    """Entry point."""
    run_command(app, "fsdpbench")


if __name__ == "__main__":
    main()
