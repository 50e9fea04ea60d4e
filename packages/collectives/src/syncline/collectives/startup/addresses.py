"""Find the addresses at which the hosts of a job reach each other, by trying all addresses.

A host's name is not enough: the name may resolve to 127.0.1.1, to nothing, or to an address that no other host can reach.

So rank 0 opens a "door" at each of its addresses: a listening socket that sends a secret word to each peer. All other ranks try
all doors. Rank 0 gets the address of the first door that every rank has reached. Each other rank gets the address of its own
end of the connection to this door. (The word proves that rank 0 has answered, and not a proxy or another host.)
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, cast

from ..engine.cancel_scope import CancelScope
from ..errors import LaunchError
from .nodes import host_identity

logger = logging.getLogger("syncline.collectives")

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"  # torch reads this variable, too
_IS_UP = 0x1
_CHOOSE = f"choose the interface with {INTERFACE_VARIABLE} or `interface` in the site file"
# Once a door has answered, wait this long for the other doors. A door behind an interface that leads nowhere never answers.
_OTHERS_S = 0.5
_LONGEST_TRY_S = 15.0
LOOPBACK = "127.0.0.1"
_WORD_BYTES = 32
_LOOK_S = 0.05

Place = tuple[str, int]
"""An address and a port."""


@dataclass(frozen=True)
class OwnAddress:
    """A numeric address of this host, and the name of the address's network interface."""

    interface: str
    address: str

    @property
    def is_loopback(self) -> bool:
        """Whether only this host can reach the address."""
        return self.address.startswith("127.") or self.address == "::1"


def chosen_interfaces(environ: Mapping[str, str], site: str | None = None) -> tuple[str, ...]:
    """Return the names of the network interfaces that the user has chosen, if any. A pure function.

    The variable GLOO_SOCKET_IFNAME in `environ` names the interfaces, separated by commas. If it is not set, `site` (the key
    `interface` of the site file) names the interfaces.
    """
    chosen = environ.get(INTERFACE_VARIABLE) or site or ""
    return tuple(name for name in chosen.replace(" ", "").split(",") if name)


def loopback_domain() -> str:
    """Return a text that two processes have in common if they reach each other at the loopback address."""
    host = host_identity()
    with suppress(OSError):
        return f"{host.hostname}/{host.boot_id}/{os.readlink('/proc/self/ns/net')}"
    # Without /proc the namespace is unknown, so the host alone decides.
    return f"{host.hostname}/{host.boot_id}"


def own_addresses(interfaces: Sequence[str] = ()) -> list[OwnAddress]:
    """Return the addresses at which other hosts may reach this host. IPv4 addresses come first.

    If `interfaces` is not empty, return all their addresses in the order of `interfaces`, including loopback addresses.

    Raises:
        LaunchError: one of `interfaces` does not exist, is down, or has no address.
    """
    found = _all_addresses()
    for name in interfaces:
        if not any(entry.interface == name for entry in found):
            there = ", ".join(dict.fromkeys(entry.interface for entry in found)) or "none"
            raise LaunchError(
                f"interface '{name}' ({INTERFACE_VARIABLE}, or `interface` in the site file) has no address on host "
                f"{socket.gethostname()}; those that have one: {there}"
            )
    if interfaces:
        # Keep the user's order. Also keep a loopback address, because the user has asked for its interface.
        return [entry for name in interfaces for entry in found if entry.interface == name]
    return [entry for entry in found if not entry.is_loopback]


def addresses_for_others(interfaces: Sequence[str]) -> list[OwnAddress]:
    """Return the addresses of `own_addresses` that are not loopback addresses, for a job of several hosts.

    Raises:
        LaunchError: there are only loopback addresses, or one of `interfaces` has no address.
    """
    found = own_addresses(interfaces)
    if all(entry.is_loopback for entry in found):
        which = f"interface {', '.join(interfaces)}" if interfaces else "this host"
        raise LaunchError(
            f"the job runs on several hosts, but {which} has only loopback addresses on {socket.gethostname()}, which no other "
            f"host reaches: {_CHOOSE}"
        )
    return [entry for entry in found if not entry.is_loopback]


def address_towards(address: str) -> str:
    """Return this host's own address on the route to `address`, an address of another host. The function sends nothing.

    Raises:
        LaunchError: the system has no route to the address.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise LaunchError(f"host {socket.gethostname()} knows no way to {address} ({error}): {_CHOOSE}") from error


class Doors:
    """Listening sockets at some addresses of this host. Inside `with`, a thread sends a word to every program that connects.

    If the system refuses an address, the address gets no socket, and a warning in the log says why.

    Attributes:
        word: a random text. A peer that receives the word knows that it has reached this process.
        places: the addresses and ports of the sockets.
    """

    def __init__(self, addresses: Sequence[OwnAddress]) -> None:
        self.word = secrets.token_hex(_WORD_BYTES // 2)
        self._open = ExitStack()
        self._sockets = [door for entry in addresses if (door := self._door(entry.address)) is not None]
        self.places: list[Place] = [door.getsockname()[:2] for door in self._sockets]
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._answer, name="syncline-doors", daemon=True)

    def __enter__(self) -> Doors:
        self._thread.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._closing.set()
        self._thread.join()
        self._open.close()

    def _door(self, address: str) -> socket.socket | None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            door = self._open.enter_context(socket.socket(family, socket.SOCK_STREAM))
            door.bind((address, 0))
            door.listen(1024)
            door.setblocking(False)
        # Do not raise: the other ranks would wait for this rank. They can use its other addresses.
        except OSError as error:
            logger.warning("host %s cannot listen at its address %s: %s", socket.gethostname(), address, error)
            return None
        return door

    def _answer(self) -> None:
        with selectors.DefaultSelector() as selector:
            for door in self._sockets:
                selector.register(door, selectors.EVENT_READ)
            while not self._closing.is_set():
                for key, _ in selector.select(_LOOK_S):
                    with suppress(OSError):  # the other side has closed the connection
                        visitor = cast("socket.socket", key.fileobj).accept()[0]
                        with visitor:
                            visitor.send(self.word.encode())


@dataclass
class Tried:
    """Which doors of rank 0 one rank has reached. A door is a listening socket: see `Doors`.

    Attributes:
        own: for each door that the rank has reached, the address of the rank's own end of the connection. The key is the
            number of the door.
        failed: for each other door, the reason in words. The key is the number of the door.
    """

    host: str = field(default_factory=socket.gethostname)
    own: dict[int, str] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return this object as values that JSON can hold. `parse` reads these values."""
        return {"host": self.host, "own": list(self.own.items()), "failed": list(self.failed.items())}

    @classmethod
    def parse(cls, said: Mapping[str, Any]) -> Tried:
        """Make an object from the values that `as_json` returned."""
        return cls(said["host"], dict(said["own"]), dict(said["failed"]))


def try_doors(places: Sequence[Place], word: str, scope: CancelScope) -> Tried:
    """Connect to all doors of rank 0 (the sockets at `places`) at once. The result says which doors answer with `word`."""
    tried = Tried()
    end_s = time.monotonic() + min(_LONGEST_TRY_S, scope.remaining_s())
    with selectors.DefaultSelector() as selector, ExitStack() as opened:
        for number, (address, port) in enumerate(places):
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            try:
                end = opened.enter_context(socket.socket(family, socket.SOCK_STREAM))
                end.setblocking(False)
                status = end.connect_ex((address, port))
            except OSError as error:  # for example, this host has no IPv6
                status = error.errno or errno.EIO
            if status in (0, errno.EINPROGRESS):
                selector.register(end, selectors.EVENT_READ, number)
            else:
                tried.failed[number] = os.strerror(status)
        while selector.get_map() and (left_s := end_s - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                selector.unregister(key.fileobj)
                _note(tried, key.data, key.fileobj, word)
            if tried.own:
                end_s = min(end_s, time.monotonic() + _OTHERS_S)
        for key in selector.get_map().values():
            tried.failed[key.data] = "no answer"
    return tried


def _note(tried: Tried, number: int, end: Any, word: str) -> None:
    try:
        said = end.recv(_WORD_BYTES)
    except OSError as error:
        tried.failed[number] = os.strerror(error.errno or errno.EIO)
        return
    if said == word.encode():
        tried.own[number] = end.getsockname()[0]
    else:
        tried.failed[number] = "something else answers there"


def agreed_addresses(places: Sequence[Place], tried: Mapping[int, Tried]) -> dict[int, str]:
    """Return, for each rank, the address at which the other ranks reach this rank. A pure function.

    Args:
        places: the address and the port of each door of rank 0 (see `Doors`).
        tried: for each rank except 0, the doors that the rank has reached.

    Raises:
        LaunchError: a rank has reached no door, or rank 0 has none.
    """
    if tried and not places:
        raise LaunchError(
            f"rank 0 can listen at none of its addresses: {_CHOOSE}\nThe log of rank 0 says why for each address."
        )
    for rank, one in tried.items():
        if not one.own:
            why = "\n".join(f"- {places[number][0]}: {reason}" for number, reason in sorted(one.failed.items()))
            raise LaunchError(
                f"rank {rank} (host {one.host}) reaches rank 0 at none of its addresses: {_CHOOSE}, or open the firewall\n"
                f"What it tried:\n{why}"
            )
    # If no door was reached by all ranks, take the door that most ranks have reached. The ranks that have not reached this door
    # take another door that they have reached.
    common = [number for number in range(len(places)) if all(number in one.own for one in tried.values())]
    reached = max(range(len(places)), key=lambda number: sum(number in one.own for one in tried.values()))
    door = common[0] if common else reached
    addresses = {rank: one.own.get(door, next(iter(one.own.values()))) for rank, one in tried.items()}
    return {0: places[door][0], **addresses}


# ---- the system's list of addresses ----


class _SocketAddress(ctypes.Structure):
    _fields_ = (("family", ctypes.c_ushort), ("data", ctypes.c_ubyte * 26))


class _InterfaceAddress(ctypes.Structure):
    """One entry of the list that the C function getifaddrs returns."""


_InterfaceAddress._fields_ = (
    ("next", ctypes.POINTER(_InterfaceAddress)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(_SocketAddress)),
)


def _all_addresses() -> list[OwnAddress]:
    """Return the addresses of all interfaces that are up, without link-local IPv6 addresses. IPv4 addresses come first."""
    library = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_InterfaceAddress)()
    if library.getifaddrs(ctypes.byref(first)) != 0:
        raise LaunchError(f"the system does not list the addresses of this host: {os.strerror(ctypes.get_errno())}")
    found: list[OwnAddress] = []
    try:
        entry: Any = first  # a null pointer is false
        while entry:
            here = entry.contents
            entry = here.next
            # An interface without an address has a null pointer here.
            if here.address and here.flags & _IS_UP:
                address = _as_text(here.address.contents)
                if address is not None:
                    found.append(OwnAddress(here.name.decode(), address))
    finally:
        library.freeifaddrs(first)
    return sorted(found, key=lambda entry: ":" in entry.address)


def _as_text(address: _SocketAddress) -> str | None:
    family = address.family if os.uname().sysname == "Linux" else address.family >> 8  # BSD: the length comes first
    data = bytes(address.data)
    if family == socket.AF_INET:
        return socket.inet_ntop(socket.AF_INET, data[2:6])
    if family != socket.AF_INET6 or data[6:8] == b"\xfe\x80":  # a link-local address needs an interface's name
        return None
    return socket.inet_ntop(socket.AF_INET6, data[6:22])
