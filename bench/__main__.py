"""`python -m bench`: the speed table."""

from bench.grid import main

if __name__ == "__main__":
    main()
