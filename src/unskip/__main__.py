"""`python -m unskip` is `unskip`."""

from unskip.cli import process

if __name__ == "__main__":
    process()
