"""The command line, ``moonopt`` or ``python -m moonopt``; its packages come with the extra ``bench``."""

import sys


def main() -> None:
    try:
        from moonopt.cli import main as run
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "jinja2", "matplotlib", "click"):
            raise
        sys.exit(f"Error: the command line needs the package {error.name!r}. Install it with: pip install 'moonopt[bench]'")
    except KeyboardInterrupt:  # while torch is imported; later on commands see to it themselves
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
