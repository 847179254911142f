"""`python -m unskip` runs the command `unskip`."""

from unskip.cli import process

if __name__ == "__main__":
    process()
