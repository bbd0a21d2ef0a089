"""`python -m topw_deploy` is the command `topw`."""

from topw_deploy.cli.main import main

main()
