"""A heated house under a chaotic sky: simulated series, without a download.

The sky is Lorenz's smallest general circulation model; the house is four heat balances.
"""

import math

import numpy as np
from jaxtyping import Float

HOURS = 3000  # 125 days, from 1 November on
NAMES = (
    "wind (m/s)",
    "sun (W/m2)",
    "outside (deg C)",
    "wall (deg C)",
    "floor (deg C)",
    "room (deg C)",
    "heating (kW)",
)
LATITUDE = math.radians(48.0)
FIRST_DAY = 305  # of the year
SPIN_UP = 480.0  # hours simulated before the first row


def simulated_house() -> tuple[Float[np.ndarray, "n 7"], tuple[str, ...]]:
    """Hourly weather and temperatures of a house with floor heating.

    Westerly wind and two waves follow Lorenz (Tellus 36A, 1984; five days to his unit
    of time). They set wind, clouds and the air that flows in; the sun follows latitude,
    date and clouds (Kasten & Czeplak, Solar Energy 24, 1980). Walls lose heat to the
    wind, the sun shines on them and through the windows, and a controller heats the
    floor where the room is colder than its set point, which is lower at night.

    Returns:
      Values, float64, and the names of their columns.
    """
    from scipy.integrate import solve_ivp

    start = [1.0, 1.0, 0.0, 5.0, 8.0, 22.0, 20.0]
    hours = SPIN_UP + np.arange(HOURS)
    solution = solve_ivp(
        _change, (0.0, hours[-1]), start, t_eval=hours, rtol=1e-5, atol=1e-6
    )
    west, cloud_wave, _, outside, wall, floor, room = solution.y
    columns = (
        [_wind(x) for x in west],
        [_sun(t, y) for t, y in zip(hours, cloud_wave, strict=True)],
        outside,
        wall,
        floor,
        room,
        [_heating(t, x) for t, x in zip(hours, room, strict=True)],
    )
    return np.stack([np.asarray(x, np.float64) for x in columns], axis=1), NAMES


def _change(hour: float, state: np.ndarray) -> list[float]:
    """Change of the state in an hour: x, y, z of the sky, and four temperatures."""
    x, y, z, outside, wall, floor, room = state.tolist()
    wind, sun = _wind(x), _sun(hour, y)
    loss = 0.10 + 0.02 * wind  # kW per K, of all walls
    draught = 0.01 + 0.006 * wind
    through_wall, through_floor = 0.4 * (wall - room), 0.8 * (floor - room)
    return [
        (-y * y - z * z - 0.25 * x + 0.25 * 8.0) / 120,
        (x * y - 4.0 * x * z - y + 1.0) / 120,
        (4.0 * x * y + x * z - z) / 120,
        (3.0 + 4.0 * z - outside) / 12 + 0.004 * sun,
        (loss * (outside - wall) - through_wall + 0.003 * sun) / 5.0,
        (_heating(hour, room) - through_floor + 0.001 * sun) / 6.0,
        (through_wall + through_floor + draught * (outside - room) + 0.002 * sun) / 1.5,
    ]


def _wind(west: float) -> float:
    """Speed of the wind, m/s."""
    return 2.0 + 3.0 * math.log1p(math.exp(2.0 * west - 1.0)) / 2.0


def _sun(hour: float, cloud_wave: float) -> float:
    """Irradiance of level ground, W/m2."""
    day = FIRST_DAY + (hour - SPIN_UP) / 24
    tilt = math.radians(23.44) * math.sin(2 * math.pi * (day - 81) / 365.25)
    turn = math.pi * (hour % 24 - 12) / 12
    height = math.sin(LATITUDE) * math.sin(tilt)
    height += math.cos(LATITUDE) * math.cos(tilt) * math.cos(turn)
    cover = 1 / (1 + math.exp(-2.0 * cloud_wave))
    return max(0.0, 910 * height - 30) * (1 - 0.75 * cover**3.4)


def _heating(hour: float, room: float) -> float:
    """Power of the heating, kW, never more than 9."""
    target = 19.0 + 1.5 / (1 + math.exp(4 * math.cos(2 * math.pi * (hour - 2) / 24)))
    return 4.5 + 4.5 * math.tanh((target - room) / 0.8)
