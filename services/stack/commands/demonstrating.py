"""The demo, and what of it the containers need."""

from pathlib import Path
from typing import Annotated

import typer

from services.stack.commands.common import console

DemoFolder = Annotated[Path, typer.Option(help="where data, runs, logs and the report go")]
DemoConfig = Annotated[Path, typer.Option("--config", "-c", help="the demo's configuration")]


def register(app: typer.Typer) -> None:
    for command in (demo, materials, stack_files):
        app.command()(command)


def demo(
    folder: DemoFolder = Path("var/demo"),
    config: DemoConfig = Path("config/demo.yaml"),
    port: Annotated[int, typer.Option(min=1, max=65535, help="port of the SGLang server")] = 30000,
) -> None:
    """Run the main job from end to end on this machine's CPU, with a small real model; see `make demo`."""
    from services.stack.demo.run import run_demo

    run_demo(folder, config, port, console)


def materials(folder: DemoFolder = Path("var/demo"), config: DemoConfig = Path("config/demo.yaml")) -> None:
    """Put the demo's prompts, target model and existing corpus in place, as the demo itself would."""
    from services.settings import load_settings
    from services.stack.demo.containers import put_materials_in_place

    put_materials_in_place(load_settings(config), folder)


def stack_files(
    folder: DemoFolder = Path("var/demo"),
    config: DemoConfig = Path("config/demo.yaml"),
    env_file: Annotated[Path, typer.Option(help="file to write, unless it is there")] = Path(".env"),
) -> None:
    """Write .env and a configuration with which compose.cpu.yaml runs the demo in containers."""
    from services.settings import load_settings
    from services.stack.demo.containers import write_stack_files

    write_stack_files(load_settings(config), folder, env_file)
