"""`python -m thinwire`, so that torchrun can start the command line: `torchrun ... -m thinwire train`."""

from thinwire.cli.main import main

main()
