"""`baton front`: become a front of a router on this or another host."""

import argparse
import os
import sys

from common.base.errors import ConfigError
from common.settings.argument_parser import Commands
from common.settings.config import ROUTER_SECTIONS, Config
from common.settings.options import add_flags, from_flags, to_flags
from deploy.processes.exec_child import child_environment
from deploy.serve.command import with_model

MODULE = "router.front"


def add_front(commands: Commands) -> None:
    parser = commands.add_parser(
        "front",
        usage="baton front MODEL --dispatcher ENDPOINT [option ...]",
        help="serve HTTP for a router elsewhere: another process that reads requests and writes texts",
        description="Serve HTTP for a router that was started with --router-front-endpoint. Tokens of all its fronts "
        "are computed by the workers of that router, under its limits and shares. Each front has a port of its own.",
        allow_abbrev=False,
    )
    parser.add_argument("model.path", metavar="MODEL", help="the model, named as for baton serve")
    parser.add_argument(
        "--dispatcher",
        dest="router.front_endpoint",
        metavar="ENDPOINT",
        help="--router-front-endpoint of the router: auto, ipc://PATH, or tcp://HOST:PORT with --net-secret-file",
    )
    parser.add_argument(
        "--host", dest="router.host", metavar="ADDRESS", help="address that HTTP binds to (default: 127.0.0.1)"
    )
    parser.add_argument(
        "--port", dest="router.port", type=int, metavar="PORT", help="port that HTTP binds to (default: 8000)"
    )
    add_flags(parser, Config, ROUTER_SECTIONS)


def front(args: argparse.Namespace) -> int:
    """Replace this process by the front; raises ConfigError without an endpoint."""
    config = from_flags(Config, args)
    if not config.router.front_endpoint:
        raise ConfigError("baton front needs --dispatcher, the --router-front-endpoint of a router")
    config = with_model(config, config.model.path)
    command = [sys.executable, "-P", "-m", MODULE, *to_flags(config, ROUTER_SECTIONS)]
    os.execve(sys.executable, command, child_environment(os.environ))
