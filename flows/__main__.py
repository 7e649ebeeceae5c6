"""The `dps` command, also as `python -m flows`."""

import sys
from importlib.util import find_spec

NEEDED = ("typer", "pydantic", "yaml", "mlflow", "pandas", "matplotlib", "sklearn", "scipy")


def main() -> None:
    """Run the `dps` command, if the packages that it needs are installed."""
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        needs = f"needs {', '.join(missing)}: install dps with its extra `experiments`"
        print(f"dps: the command {needs}", file=sys.stderr)
        sys.exit(2)
    from flows.cli import main as command

    command()


if __name__ == "__main__":
    main()
