"""The two ends of a connection between a driver and an agent in one process."""

from __future__ import annotations

import asyncio

from megascale.operate.channel.ends import AgentEnd, Disconnected, DriverEnd
from megascale.operate.channel.messages import Heartbeat, Hello, Leave, RanksEnded

HELLO, MISSED = Hello("n0", "h", "127.0.0.1", 2), RanksEnded(0, ())


def test_both_ends_send_in_order_until_the_agent_leaves() -> None:
    async def test() -> None:
        driver = DriverEnd()
        agent = AgentEnd(driver, lambda: [HELLO, MISSED])
        assert not driver.agents and not driver.send("n0", Leave("too early"))
        async with agent:
            assert driver.agents == {"n0"} and agent.lost_s == 0
            assert agent.send(Heartbeat(1.0)) and driver.send("n0", Leave("bye"))
            assert not driver.send("n1", Leave("nobody"))
            assert await anext(aiter(agent)) == Leave("bye")
        assert not driver.agents
        said = [await anext(aiter(driver)) for _ in range(4)]
        expected = [HELLO, MISSED, Heartbeat(1.0), Disconnected("the agent has ended")]
        assert said == [("n0", message) for message in expected]

    asyncio.run(asyncio.wait_for(test(), 60))
