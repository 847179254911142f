"""`python -m unskip` is `unskip`."""

from unskip.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
