"""The commands of the live cluster. What they need beyond the harness is the extra [live]."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from harness import experiment as experiments
from harness.errors import InputError

_NEEDED = ("fastapi", "uvicorn")


def check_extra() -> None:
    """InputError where the extra [live] is not installed."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError("harness live", f"needs {', '.join(missing)}", "pip install '.[live]'")


def live(
    file: Annotated[Path, typer.Argument(metavar="EXPERIMENT.yaml", help="Experiment file with a section `live`.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="a.b=c", help="Override a field; repeatable.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Folder for logs and records.")] = None,
) -> None:
    """The cluster on the wall clock: worker servers, the real router, Envoy, and a page, until Ctrl-C."""
    check_extra()
    from harness.folders import results_folder
    from harness.live.run import run_live

    experiment = experiments.load_experiment(file, overrides)
    with results_folder(out or Path(experiment.output.dir) / experiment.name) as folder:
        run_live(experiment, folder)


def page(
    endpoints: Annotated[Path, typer.Option("--endpoints", metavar="FILE", help="The router's endpoints file.")],
    gateway: Annotated[str, typer.Option("--gateway", help="The gateway's address, for the curl on the page.")] = "",
    router_metrics: Annotated[str | None, typer.Option("--router-metrics", help="The router's /metrics.")] = None,
    model: Annotated[str, typer.Option("--model", help="Served model, as the page names it.")] = "",
    host: Annotated[str, typer.Option("--host", help="Where the page listens.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Its port.")] = 8090,
    access_log_port: Annotated[
        int, typer.Option("--access-log-port", min=0, max=65535, help="Where Envoy's gRPC log arrives.")
    ] = 9011,
    results: Annotated[Path | None, typer.Option("--results", help="Folder of replays to list.")] = None,
) -> None:
    """The live page of a cluster that runs elsewhere (compose, Kubernetes)."""
    check_extra()
    from harness.live.page_server import serve_page

    serve_page(endpoints, gateway, router_metrics, model, host, port, access_log_port, results)


def bench(
    file: Annotated[Path, typer.Argument(metavar="EXPERIMENT.yaml", help="What the cluster was started with.")],
    url: Annotated[str, typer.Option("--url", help="The gateway.")] = "http://127.0.0.1:8080",
    trace: Annotated[str | None, typer.Option("--trace", metavar="FILE", help="Replay this trace instead.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="a.b=c", help="Override a field; repeatable.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Where to write.")] = None,
    token_ids: Annotated[bool, typer.Option("--token-ids", help="Send prompts as token ids, not as text.")] = False,
) -> None:
    """Replay the experiment's trace through a running gateway, as a client."""
    check_extra()
    from harness.folders import results_folder
    from harness.live.bench import run_bench
    from harness.results.store import REPORT
    from harness.results.table import print_table

    experiment = experiments.load_experiment(file, overrides, trace)
    with results_folder(out or Path(experiment.output.dir) / f"{experiment.name}-bench") as folder:
        run = run_bench(experiment, url, folder, token_ids=token_ids)
    print_table([run.summary])
    print(f"\nreport: {folder / REPORT}")
