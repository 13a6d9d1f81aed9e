"""How many servers bring the wait in a line under a target.

The mean wait of GI/G/m after Sakasegawa (Ann. Inst. Statist. Math. 29, 1977), in the form of Whitt,
"Approximating the GI/G/m queue" (Prod. Oper. Manag. 2, 1993); for one server and random arrivals it
is the Pollaczek-Khinchine formula of M/G/1, exactly. That placement gives each prompt to the worker
with the least predicted wait makes one line of many workers, which is what m servers model.
"""

import math


def mean_wait_s(
    num_servers: int, requests_per_s: float, service_s: float, *, arrival_scv: float, scv: float
) -> float:
    """Mean wait of a request; infinite where more comes than is done.

    Args:
        num_servers: servers of one line, 1 or more.
        requests_per_s: arrivals.
        service_s: mean time that a request keeps a server.
        arrival_scv: squared coefficient of variation of the times between arrivals.
        scv: squared coefficient of variation of the service time.
    """
    use = requests_per_s * service_s / num_servers
    if use >= 1:
        return math.inf
    crowding = math.pow(use, math.sqrt(2 * (num_servers + 1)) - 1) / (num_servers * (1 - use))
    return (arrival_scv + scv) / 2 * crowding * service_s


def servers_for(
    target_wait_s: float,
    requests_per_s: float,
    service_s: float,
    *,
    arrival_scv: float,
    scv: float,
) -> int:
    """The fewest servers whose mean wait is at most `target_wait_s`, which is over 0."""
    if requests_per_s <= 0 or service_s <= 0:
        return 0
    # Little's law: so many are busy on average; fewer servers could not keep up.
    num_servers = math.floor(requests_per_s * service_s) + 1
    while (
        mean_wait_s(num_servers, requests_per_s, service_s, arrival_scv=arrival_scv, scv=scv)
        > target_wait_s
    ):
        num_servers += 1
    return num_servers
