"""`python -m lmi_bench` is the command `lmi-bench`."""

from lmi_bench.cli.main import main

if __name__ == "__main__":
    main()
