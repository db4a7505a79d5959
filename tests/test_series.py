"""Series: known sets, the demo, csv files good and bad, windows, scaling, baselines."""

import gzip
import re
import socket
import sys
import tracemalloc

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from conftest import SHARED, slow_where
from numpy.lib.stride_tricks import sliding_window_view

from uhop_jax import data
from uhop_jax.models import baselines as simple

HOUR = np.timedelta64(3600, "s")


def known(name):
    file = SHARED / f"{data.SOURCES[name].file}.gz"
    if not file.exists():
        pytest.skip(f"needs {file}")
    return data.series(name, directory=SHARED)


def split_of(name, in_len, out_len):
    series = known(name)
    where = data.borders(name, len(series.values))
    return series, data.splits(series.values, where, in_len=in_len, out_len=out_len)


# Known sets


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "shape", "minutes", "first", "last"),
    [
        ("etth1", (17_420, 7), 60, "2016-07-01T00:00:00", "2018-06-26T19:00:00"),
        ("ettm1", (69_680, 7), 15, "2016-07-01T00:00:00", "2018-06-26T19:45:00"),
        ("wth", (35_064, 12), 60, "2010-01-01T00:00:00", "2013-12-31T23:00:00"),
    ],
)
def test_known_sets_are_whole(name, shape, minutes, first, last):
    series = known(name)
    assert series.values.shape == shape and series.values.dtype == np.float64
    assert len(series.names) == shape[1] and series.dates.dtype == "datetime64[s]"
    assert series.step == np.timedelta64(60 * minutes, "s")
    assert series.period == 24 * 60 // minutes
    assert str(series.dates[0]) == first and str(series.dates[-1]) == last
    assert series.following(2)[1] == series.dates[-1] + 2 * series.step


@pytest.mark.slow
def test_every_fourth_row_of_ettm1_is_etth1():
    hours, quarters = known("etth1"), known("ettm1")
    np.testing.assert_allclose(quarters.values[::4], hours.values, rtol=1e-15)
    np.testing.assert_array_equal(quarters.dates[::4], hours.dates)


def test_a_changed_file_is_refused_and_line_ends_are_not(tmp_path):
    file = SHARED / "ETTh1.csv.gz"
    if not file.exists():
        pytest.skip(f"needs {file}")
    text = gzip.open(file).read()
    (tmp_path / "ETTh1.csv").write_bytes(text.replace(b"\n", b"\r\n"))
    assert len(data.series("etth1", directory=tmp_path).values) == 17_420
    (tmp_path / "ETTh1.csv").write_bytes(text.replace(b"5.8", b"5.9", 1))
    with pytest.raises(ValueError, match=r"not the ETTh1.csv that etth1 .*SHA-256"):
        data.series("etth1", directory=tmp_path)


@pytest.mark.parametrize("name", ["etth1", "wth"])
def test_without_a_network_the_error_names_the_directory(tmp_path, monkeypatch, name):
    pytest.importorskip("pooch", reason="needs the extra `data`")

    def unreachable(*_, **__):
        raise OSError

    monkeypatch.setattr(socket, "create_connection", unreachable)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    with pytest.raises(ValueError, match=f"{name} is not in data.dir .*set data.dir"):
        data.series(name, directory=tmp_path)


def test_unknown_names():
    with pytest.raises(ValueError, match="unknown series 'etth9'; choose one of demo"):
        data.series("etth9")
    with pytest.raises(ValueError, match="no such file: absent.csv"):
        data.series("absent.csv")


def test_the_demo_is_a_house():
    series = data.series("demo")
    assert series.values.shape == (3000, 7) and np.isfinite(series.values).all()
    np.testing.assert_array_equal(series.values, data.series("demo").values)
    values = dict(zip(series.names, series.values.T, strict=True))
    hours = series.dates.astype("datetime64[h]").astype(int) % 24
    assert (values["sun (W/m2)"][hours < 5] == 0).all()
    assert values["sun (W/m2)"].max() > 300
    heating, room = values["heating (kW)"], values["room (deg C)"]
    assert 0 < heating.min() and heating.max() < 9 and 18 < room.min() < room.max() < 23
    lag = np.corrcoef(values["outside (deg C)"][:-3], values["wall (deg C)"][3:])[0, 1]
    assert lag > 0.8  # the wall follows the air
    split = data.splits(
        series.values, data.borders("demo", 3000), in_len=96, out_len=24
    )
    fits = simple.baselines(split.train, period=series.period)
    errors = {r["method"]: r["mse"] for r in simple.evaluate(fits, split.test)}
    assert errors["linear"] < 0.5 * errors["seasonal"] < 0.5 * errors["last value"]


# Files

DAYS = [f"2020-02-{day:02}" for day in (27, 28, 29)] + ["2020-03-01"]
DMY = [x.astype("O").strftime("%d.%m.%Y") for x in np.array(DAYS, "datetime64[D]")]


def write(tmp_path, text, name="own.csv"):
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if "gz" in name else text.encode())
    return path


def rows(dates, *columns):
    columns = columns or (range(len(dates)),)
    lines = [f"date,{','.join('abc'[: len(columns)])}"]
    lines += [",".join(map(str, row)) for row in zip(dates, *columns, strict=True)]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("dates", "first", "step"),
    [
        (DAYS, "2020-02-27T00:00:00", 24),
        ([f"{d} 00:00:00" for d in DAYS], "2020-02-27T00:00:00", 24),
        ([f"{d}T06:30Z" for d in DAYS], "2020-02-27T06:30:00", 24),
        ([f"{d}T00:00:00+02:00" for d in DAYS], "2020-02-27T00:00:00", 24),
        (DMY, "2020-02-27T00:00:00", 24),
        ([f"{d} 6:30" for d in DMY], "2020-02-27T06:30:00", 24),
        (["2/27/2020", "2/28/2020", "2/29/2020"], "2020-02-27T00:00:00", 24),
        (["27/2/20", "28/2/20", "29/2/20"], "2020-02-27T00:00:00", 24),
        (
            ["2/27/2020 11:00 PM", "2/28/2020 12:00 AM", "2/28/2020 1:00 AM"],
            "2020-02-27T23:00:00",
            1,
        ),
        ([f"1/1/2010 {h}:00" for h in (0, 1, 2)], "2010-01-01T00:00:00", 1),
        (["1/1/2010 16:00", "1/2/2010 0:00", "1/2/2010 8:00"], "2010-01-01T16:00", 8),
        (["27-Feb-20", "28-Feb-20", "29-Feb-20"], "2020-02-27T00:00:00", 24),
        (["Feb 27, 2020", "Feb 28, 2020", "Feb 29, 2020"], "2020-02-27T00:00:00", 24),
        (["2020.02.27", "2020.02.28", "2020.02.29"], "2020-02-27T00:00:00", 24),
        (["20200227", "20200228", "20200229"], "2020-02-27T00:00:00", 24),
        (  # the clocks change: by the clock of the last row
            ["2020-03-29T01:00+01:00", "2020-03-29T03:00+02:00", "2020-03-29T04:00+02"],
            "2020-03-29T02:00:00",
            1,
        ),
        ([f"2020-02-27T{h:02}+01:00" for h in range(3)], "2020-02-27T00:00:00", 1),
        ([f"20200227T{h:02}00+0100" for h in range(3)], "2020-02-27T00:00:00", 1),
    ],
    ids=lambda x: x[0] if isinstance(x, list) else str(x),
)
def test_styles_of_dates(tmp_path, dates, first, step):
    quoted = [f'"{d}"' for d in dates]
    series = data.read_series(write(tmp_path, rows(quoted), "own.csv.gz"))
    assert series.dates[0] == np.datetime64(first) and series.names == ("a",)
    assert series.step == step * HOUR and series.values[:, 0].tolist() == [
        *range(len(dates))
    ]


@pytest.mark.parametrize(
    ("dates", "steps", "following", "period"),
    [
        (["2020-01-01", "2020-02-01", "2020-03-01"], "months", "2020-04-01", 12),
        (["2019-12-15", "2020-01-15", "2020-02-15"], "months", "2020-03-15", 12),
        (
            ["2019-12-31", "2020-01-31", "2020-02-29"],
            "month ends",
            "2020-03-31",
            12,
        ),
        (["2019-11-30", "2019-12-30", "2020-01-30"], "months", "2020-02-29", 12),
        (["2019-12-30", "2020-01-30", "2020-02-29"], "months", "2020-03-30", 12),
        (["2019-04-01", "2019-07-01", "2019-10-01"], "3 months", "2020-01-01", 4),
        (
            ["2018", "2019", "2020", "2021"],
            "12 months",
            "2022-01-01",
            1,
        ),
        (
            ["2020-01-02", "2020-01-03", "2020-01-06", "2020-01-07", "2020-01-08"]
            + ["2020-01-09", "2020-01-10"],
            "weekdays",
            "2020-01-13",
            5,
        ),
        (["2020-01-01", "2020-01-08", "2020-01-15"], "7 days", "2020-01-22", 52),
        (["2020-01-01", "2020-01-02", "2020-01-03"], "1 day", "2020-01-04", 7),
    ],
    ids=lambda x: x[0] if isinstance(x, list) else str(x),
)
def test_dates_continue_by_the_calendar(tmp_path, dates, steps, following, period):
    series = data.read_series(write(tmp_path, rows(dates)))
    assert series.steps == steps and series.period == period
    assert series.following(1)[0] == np.datetime64(following)
    dates = np.concatenate([series.dates, series.following(40)])
    again = data.read_series(write(tmp_path, rows(dates)))  # its continuation is one
    assert again.steps == steps and len(again.values) == len(dates)
    days = pd.DatetimeIndex(dates).day
    if steps == "months":  # the day of the first, in every month that has it
        assert days.max() == days[0] and set(days[days < days[0]]) <= {28, 29}


GOOD = ["2020-01-01 00:00", "2020-01-01 01:00", "2020-01-01 02:00", "2020-01-01 03:00"]
GAP = [*GOOD, "2020-01-01 06:00", "2020-01-01 07:00"]
TWICE = [GOOD[0], GOOD[1], GOOD[1], *GOOD[2:]]

BAD = {
    "empty cell": (
        rows(GOOD, (1, "", 3, 5)),
        r"line 3, column 'a': the value is missing \(1 are\); missing='interpolate'",
        {"missing": "interpolate"},
        [1, 2, 3, 5],
    ),
    "NA": (
        rows(GOOD, ("NA", 2, 3, "nan")),
        r"line 2, column 'a': the value is missing \(2 are\)",
        {"missing": "interpolate"},
        [2, 2, 3, 3],
    ),
    "gap": (
        rows(GAP, (0, 1, 2, 3, 6, 7)),
        "line 6: 2020-01-01 06:00:00 follows 2020-01-01 03:00:00, with a step of 1 hour"
        " 2 rows are missing between them; gaps='fill'",
        {"gaps": "fill"},
        [0, 1, 2, 3, 4, 5, 6, 7],
    ),
    "month gap": (
        rows(["2020-01-01", "2020-02-01", "2020-04-01", "2020-05-01"], (0, 1, 3, 4)),
        "line 4: 2020-04-01 00:00:00 follows 2020-02-01 00:00:00",
        {"gaps": "fill"},
        [0, 1, 2, 3, 4],
    ),
    "duplicate, first": (
        rows(TWICE, (0, 1, 3, 4, 5)),
        "line 4: 2020-01-01 01:00:00 is there already, in line 3; duplicates='first'",
        {"duplicates": "first"},
        [0, 1, 4, 5],
    ),
    "duplicate, mean": (
        rows(TWICE, (0, 1, 3, 4, 5)),
        "is there already",
        {"duplicates": "mean"},
        [0, 2, 4, 5],
    ),
    "unsorted": (
        rows([GOOD[i] for i in (0, 2, 1, 3)], (0, 2, 1, 3)),
        "line 4: 2020-01-01 01:00:00 comes after 2020-01-01 02:00:00; unsorted='sort'",
        {"unsorted": "sort"},
        [0, 1, 2, 3],
    ),
    "constant": (
        rows(GOOD, (1, 2, 3, 4), (5, 5, 5, 5)),
        "column 'b' is 5 in every row; constant='keep'",
        {"constant": "drop"},
        [1, 2, 3, 4],
    ),
    "text": (
        rows(GOOD, (1, 2, 3, 4), (5, 6, "Graz", 8)),
        r"line 4, column 'b': 'Graz' is no number; .* columns=\(",
        {"columns": ("a",)},
        [1, 2, 3, 4],
    ),
    "two readings": (
        rows(["1/2/2020", "2/2/2020", "3/2/2020"]),
        "column 'date': every date can be read as '%m/%d/%Y' and as '%d/%m/%Y'; date_f",
        {"date_format": "%d/%m/%Y"},
        [0, 1, 2],
    ),
    "other dates": (
        rows(["2020 day 3", "2020 day 4", "2020 day 5"]),
        "line 2, column 'date': '2020 day 3' is no date; date_format=",
        {"date_format": "%Y day %j"},
        [0, 1, 2],
    ),
    "no date": (
        rows([*GOOD[:2], "soon", GOOD[3]]),
        "line 4, column 'date': 'soon' is no date",
        None,
        None,
    ),
    "impossible date": (
        rows(["27/2/2020", "28/2/2020", "30/2/2020"]),
        "line 4, column 'date': '30/2/2020' is no date",
        None,
        None,
    ),
    "infinite": (rows(GOOD, (1, "inf", 3, 4)), "line 3, column 'a': 'inf' is", None, 0),
    "no value": (rows(GOOD, [""] * 4), "column 'a' holds no value at all", None, 0),
    "mixed offsets": (
        rows([f"{GOOD[0]}Z", *GOOD[1:]]),
        "line 3, column 'date': '2020-01-01 01:00' has no offset from UTC",
        None,
        None,
    ),
    "off the grid": (
        rows([*GOOD, "2020-01-01 04:20"]),
        "line 6: 2020-01-01 04:20:00 does not lie on the grid of 1 hour steps",
        None,
        None,
    ),
    "huge gap": (
        rows([*GOOD, "2120-01-01 04:00"]),
        "line 6: 2120-.* the whole file lacks .*, too many to fill",
        None,
        None,
    ),
    "half seconds": (
        rows([f"2020-01-01 00:00:0{x}" for x in ("0.0", "0.5", "1.0")]),
        "line 3, column 'date': '2020-01-01 00:00:00.5' is finer than a second",
        None,
        None,
    ),
    "no columns": ("date\n2020-01-01\n", "holds one column, 'date'", None, None),
    "two rows": (rows(GOOD[:2]), "holds 2 rows, a series needs at least 3", None, None),
    "no header": (
        rows(GOOD).partition("\n")[2],
        "line 1: there is no header, .* got 2020-01-01 00:00,0",
        None,
        None,
    ),
    "ragged": (
        rows(GOOD) + f"{GOOD[0]},1,2\n",
        "line 6: 3 cells, the header has 2",
        0,
        0,
    ),
    "same names": (
        "date,a,a\n1,2,3\n",
        "line 1: two columns are named 'a'",
        None,
        None,
    ),
    "empty": ("\n\n", "own.csv is empty", None, None),
    "quotes": ('date,a\n"2020-01-01,1\n', "line 2: unexpected end of data", None, None),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files(tmp_path, case):
    text, message, options, expected = BAD[case]
    path = write(tmp_path, text)
    with pytest.raises(ValueError, match=message) as error:
        data.read_series(path)
    assert "own.csv" in str(error.value) and "\n" not in str(error.value)
    if options:
        series = data.series(str(path), **options)
        assert series.values.shape == (len(expected), 1)
        np.testing.assert_allclose(series.values[:, 0], expected)
        assert (np.diff(series.dates) > 0 * HOUR).all()


def test_days_in_local_time(tmp_path):
    """C2-16: 23 hours between two midnights are a day; hours are even in UTC."""
    days = np.datetime64("2023-01-01") + np.arange(200)
    change = np.datetime64("2023-03-26")
    dates = [f"{d}T00:00:00+0{1 + (d > change)}:00" for d in days]
    series = data.read_series(write(tmp_path, rows(dates)))
    assert (series.step, series.steps, series.period) == (24 * HOUR, "1 day", 7)
    np.testing.assert_array_equal(series.dates, days)
    assert series.zone == "+02:00"
    assert series.following(1)[0] == np.datetime64("2023-07-20")

    firsts = np.arange("2023-01", "2023-07", dtype="datetime64[M]")
    dates = [f"{d}-01T00:00+0{1 + (i > 2)}:00" for i, d in enumerate(firsts)]
    series = data.read_series(write(tmp_path, rows(dates)))
    assert series.steps == "months" and (series.dates == firsts).all()
    dates[3] = dates[3].replace("T00:00", "T00:20")
    with pytest.raises(ValueError, match="line 5: 2023-04-01 00:20:00 does not lie on"):
        data.read_series(write(tmp_path, rows(dates)))


@pytest.mark.parametrize("first", ["2023-03-25T22", "2023-10-28T22"])
def test_hours_with_offsets_over_the_changes(tmp_path, first):
    utc = np.datetime64(first, "h") + np.arange(9)
    change = np.datetime64(first, "D") + np.timedelta64(25, "h")
    summer = (utc >= change) == (first < "2023-06")
    local = utc + (1 + summer).astype("timedelta64[h]")
    dates = [f"{d}:00+0{1 + s}:00" for d, s in zip(local, summer, strict=True)]
    series = data.read_series(write(tmp_path, rows(dates)))
    assert series.step == HOUR
    assert series.dates[-1] == local[-1] and series.following(1)[0] == local[-1] + HOUR
    assert (np.diff(series.dates) == HOUR).all()
    del dates[1]  # the error shows dates of the file
    shown = str(local[0]).replace("T", " ")
    with pytest.raises(ValueError, match=f"follows {shown}:00:00, with a step of 1 ho"):
        data.read_series(write(tmp_path, rows(dates)))


def test_offsets_that_only_the_form_reads(tmp_path):
    """Dates in UTC would silently stand for dates of the file."""
    path = write(tmp_path, rows([f"2020-01-01 {h:02} +0100" for h in range(3)]))
    series = data.read_series(path, date_format="%Y-%m-%d %H %z")
    assert series.zone == "+0100" and str(series.dates[0]) == "2020-01-01T00:00:00"
    for form, zone in (("%Y-%m-%d %H:%M %Z", " 00:00 EST"), ("%Y-%m-%d%z", "+0100")):
        path = write(tmp_path, rows([f"{day}{zone}" for day in DAYS]))
        with pytest.raises(ValueError, match="line 2.* has an offset from UTC that is"):
            data.read_series(path, date_format=form)
    path = write(tmp_path, rows([f"{day} 00:00 UTC" for day in DAYS]))
    series = data.read_series(path, date_format="%Y-%m-%d %H:%M %Z")
    assert str(series.dates[0]) == "2020-02-27T00:00:00"


COUNTERS = {
    "a counter of seconds": (range(1000, 1060), "are years"),
    "values in any order": ([1500 + i * 17 % 60 for i in range(60)], "are years"),
    "late years in any order": ([1950 + i * 17 % 60 for i in range(60)], "are years"),
    "a counter from 0": (range(60), "as in 2020-01-31$"),
    "decimals": ([i / 2 for i in range(60)], "as in 2020-01-31$"),
    "seconds since 1970": (range(1_700_000_000, 1_700_000_060), "2020-01-31$"),
}


@pytest.mark.parametrize("case", COUNTERS)
def test_numbers_are_not_dates(tmp_path, case):
    """C2-20."""
    numbers, advice = COUNTERS[case]
    path = write(tmp_path, rows(numbers))
    start = (
        f"column 'date' holds the numbers {numbers[0]}, .* no dates: dates belong in"
    )
    with pytest.raises(ValueError, match=f"{start} the first column.*{advice}"):
        data.read_series(path)
    dated = zip(numbers, np.datetime64("2020-01-01") + np.arange(60), strict=True)
    lines = ["a,date,b", *(f"{n},{d},{i}" for i, (n, d) in enumerate(dated))]
    path = write(tmp_path, "\n".join(lines))
    with pytest.raises(ValueError, match="dates belong in the first column"):
        data.read_series(path, columns=("b",))


def test_years(tmp_path):
    path = write(tmp_path, rows(range(1950, 1990)))
    assert data.read_series(path).dates[-1] == np.datetime64("1989")
    path = write(tmp_path, rows(range(1500, 1560)))
    series = data.read_series(path, date_format="%Y")
    assert series.steps == "12 months" and series.dates[0] == np.datetime64("1500")


@pytest.mark.parametrize("marker", ["-9999", "-9999.0", "?", "-", "--", ".", "n.a."])
def test_markers_of_missing_values(tmp_path, marker):
    """C2-17."""
    values = [f"{5 + (i * 7 % 10 - 4.5) / 5:.2f}" for i in range(300)]
    for row in (20, 150, 299):
        values[row] = marker
    dates = np.datetime64("2020-01-01", "h") + np.arange(300)
    path = write(tmp_path, rows(dates, values))
    if marker.startswith("-9999"):
        message = (
            r"column 'a': -9999 \(3 times\) is 1000 .* missing_values=\('-9999',\)"
        )
        with pytest.warns(UserWarning, match=message):
            assert data.read_series(path).values.min() == -9999
    else:
        message = re.escape(f"{marker!r} is no number; if it marks a missing value, ")
        message += re.escape(f"missing_values=({marker!r},) says so")
        with pytest.raises(ValueError, match=f"line 22, column 'a': {message}"):
            data.read_series(path)
    declared = (-9999, "?", "-", "--", ".", "N.A.")
    with pytest.raises(ValueError, match=r"line 22, .* is missing \(3 are\)"):
        data.read_series(path, missing_values=declared)
    series = data.read_series(path, missing_values=declared, missing="interpolate")
    values = series.values[:, 0]
    assert 4 <= values.min() and values[20] == np.mean(values[[19, 21]])


@pytest.mark.parametrize("cell", ["#N/A", "<NA>", "NaN", "null"])
def test_common_words_for_missing_values(tmp_path, cell):
    path = write(tmp_path, rows(GOOD, (1, cell, 3, 4)))
    series = data.read_series(path, missing="interpolate")
    assert series.values[:, 0].tolist() == [1, 2, 3, 4]


NUMBERS = [  # C2-18: delimiter, cells, values as read, or the two that fit
    (";", "998 1,002 1,234 997 1,100 999", ("1.002", "1002")),
    (";", "998 1.002 1.234 997 1.100 999", ("1.002", "1002")),
    (";", "998 1,002 1,234 997.5 1,100", [998, 1002, 1234, 997.5, 1100]),
    (";", "998 1.002 1.234 997 1.100 999,5", [998, 1002, 1234, 997, 1100, 999.5]),
    (";", "1.234,56 -7,5 1.000.000 2e6 ,5", [1234.56, -7.5, 1e6, 2e6, 0.5]),
    (";", "0.125 12.345 1.000", [0.125, 12.345, 1]),
    (";", "1234.567 12.345 1.000", [1234.567, 12.345, 1]),
    ("\t", "1,5 2,5 3,5", [1.5, 2.5, 3.5]),
    ("\t", "1.5 2.5 3.125", [1.5, 2.5, 3.125]),
    (",", "1.125 2.125 3.125", [1.125, 2.125, 3.125]),
    (",", '"1,234.5" "2,345,678" 3e6', [1234.5, 2345678, 3e6]),
    (";", "998 999 1000", [998, 999, 1000]),
]


@pytest.mark.parametrize(("delimiter", "cells", "expected"), NUMBERS)
def test_decimal_marks_are_decided_by_all_cells(tmp_path, delimiter, cells, expected):
    cells = cells.split()
    dates = np.datetime64("2020-01-01") + np.arange(len(cells))
    lines = [f"date{delimiter}a"]
    lines += [f"{d}{delimiter}{x}" for d, x in zip(dates, cells, strict=True)]
    path = write(tmp_path, "\n".join(lines))
    if isinstance(expected, list):
        assert data.read_series(path).values[:, 0].tolist() == expected
        return
    message = rf"line 3, column 'a': {cells[1]!r} is [\d.]+ or [\d.]+, and .* 'comma'"
    with pytest.raises(ValueError, match=message) as error:
        data.read_series(path)
    assert all(f" {x}" in str(error.value) for x in expected)
    point, comma = (
        data.read_series(path, decimal=mark).values[1, 0] for mark in ("point", "comma")
    )
    assert {point, comma} == set(map(float, expected)) and (point == 1002) == (
        "," in cells[1]
    )


def test_a_cell_is_shown_as_it_stands(tmp_path):
    path = write(
        tmp_path, "date;a\n2020-01-01;1.234,56\n2020-01-02;x1,5\n2020-01-03;2\n"
    )
    with pytest.raises(ValueError, match="line 3, column 'a': 'x1,5' is no number; if"):
        data.read_series(path)
    path = write(
        tmp_path, "date;a\n2020-01-01;1.5\n2020-01-02;1.234,56\n2020-01-03;2.5"
    )
    message = "'1.234,56' is no number with a decimal point, but with a decimal comma"
    with pytest.raises(ValueError, match=f"line 3, column 'a': {message}"):
        data.read_series(path)
    with pytest.raises(ValueError, match="unknown decimal ','; choose one of auto, po"):
        data.read_series(path, decimal=",")


def test_other_files(tmp_path):
    path = write(tmp_path, "date;a\n01.02.2020;1,5\n02.02.2020;2,5\n03.02.2020;3,5\n")
    series = data.read_series(path, date_format="%d.%m.%Y")
    assert series.values[:, 0].tolist() == [1.5, 2.5, 3.5]
    path = write(tmp_path, "\ufeffdate\ta\n\n" + rows(DAYS)[7:].replace(",", "\t"))
    assert data.read_series(path).names == ("a",)
    with pytest.raises(ValueError, match="holds 1 rows, a series needs at least 3"):
        data.read_series(write(tmp_path, rows(GOOD[:1] * 4)), duplicates="first")
    path = write(tmp_path, rows(GOOD, (1, 2, 3, 4), (5, 5, 5, 5)))
    assert data.read_series(path, constant="keep").names == ("a", "b")
    with pytest.raises(ValueError, match="no column 'z' beside the dates; it has a, b"):
        data.read_series(path, columns=("z",))
    with pytest.raises(ValueError, match="unknown gaps 'guess'; choose one of error"):
        data.read_series(path, gaps="guess")
    with pytest.raises(ValueError, match="line 2, column 'date': .* is no date of the"):
        data.read_series(path, date_format="%d/%m/%Y")
    path.write_bytes(b"date,a\n\xff\xfe,1\n")
    with pytest.raises(ValueError, match="own.csv is no text in UTF-8"):
        data.read_series(path)
    path.write_bytes(gzip.compress(rows(GOOD).encode())[:-9])
    with pytest.raises(ValueError, match="own.csv is damaged or truncated"):
        data.read_series(path)
    with pytest.raises(ValueError, match="no such file"):
        data.read_series(tmp_path)


@pytest.mark.parametrize("packed", [False, True])
def test_a_csv_of_gigabytes_is_not_unpacked(tmp_path, monkeypatch, packed):
    monkeypatch.setattr(sys.modules["uhop_jax.data.tables"], "LARGEST", 2**20)
    whole = b"date,a\n" + b"0" * 2**24
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(whole) if packed else whole)
    tracemalloc.start()
    with pytest.raises(ValueError, match="a.csv.gz holds more than 1 MiB of text"):
        data.read_series(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**23  # of 16 MiB


# Windows


@pytest.mark.parametrize(("length", "number"), [(120, 1), (121, 2)])
def test_windows_are_counted(length, number):
    assert data.windows(length, 96, 24) == number


@pytest.mark.parametrize("length", [119, 50])
def test_a_series_shorter_than_the_window(length):
    with pytest.raises(
        ValueError, match=rf"120 rows \(in_len 96 and out_len 24\).* has {length}"
    ):
        data.windows(length, 96, 24)
    values = np.random.default_rng(0).random((10 * length, 2))
    with pytest.raises(ValueError, match=r"validation split, rows .*in_len 96 and"):
        data.splits(
            values, data.borders((0.8, 0.01, 0.19), 1000), in_len=96, out_len=24
        )


COUNTS = [  # UC-35 and section 8 of the specification
    ("etth1", 17_420, 96, 96, (8449, 2785, 2785)),
    ("etth1", 17_420, 96, 192, (8353, 2689, 2689)),
    ("etth1", 17_420, 96, 336, (8209, 2545, 2545)),
    ("etth1", 17_420, 96, 720, (7825, 2161, 2161)),
    ("etth1", 17_420, 168, 96, (8377, 2785, 2785)),
    ("ettm1", 69_680, 168, 96, (34_297, 11_425, 11_425)),
    ("wth", 35_064, 168, 96, (19_897, 7105, 7105)),
]
STEPS = {"etth1": 524, "ettm1": 2144, "wth": 1244}  # of 16 windows, L 168


@pytest.mark.parametrize(("name", "length", "in_len", "out_len", "expected"), COUNTS)
def test_borders_and_counts_of_the_known_sets(name, length, in_len, out_len, expected):
    where = data.borders(name, length)
    values = np.random.default_rng(0).random((length, 1))
    splits = data.splits(values, where, in_len=in_len, out_len=out_len)
    assert (splits.train.size, splits.validation.size, splits.test.size) == expected
    if in_len == 168:
        assert -(-splits.train.size // 16) == STEPS[name]
    assert splits.test.start + in_len == where.test[0] == where.validation[1]
    with pytest.raises(ValueError, match=f"borders of {name} need .* series has 100"):
        data.borders(name, 100)


def test_borders_by_fractions():
    assert data.borders("own.csv", 1000) == ((0, 700), (700, 800), (800, 1000))
    assert data.borders((0.5, 0.2, 0.1), 1000) == ((0, 500), (500, 700), (700, 800))
    assert data.borders((0.7, 0.1, 0.2), 17).test[1] == 17
    for split in ((0.7, 0.3), (0.7, 0.3, 0.0), (0.9, 0.9, 0.9)):
        with pytest.raises(ValueError, match="fractions"):
            data.borders(split, 1000)


def test_scaling_knows_the_train_rows_alone():
    values = np.random.default_rng(0).normal(5.0, 3.0, (1000, 3))
    values[:, 2] = 0.1  # constant
    where = data.borders("own", 1000)
    splits = data.splits(values, where, in_len=20, out_len=5)
    changed = values.copy()
    changed[700:, :2] *= 100
    other = data.splits(changed, where, in_len=20, out_len=5)
    for statistic, other_statistic in zip(splits.scaler, other.scaler, strict=True):
        np.testing.assert_array_equal(statistic, other_statistic)
    np.testing.assert_array_equal(splits.train.rows, other.train.rows)
    train = splits.train.rows.astype(np.float64)
    np.testing.assert_allclose(train.mean(0), 0, atol=1e-6)
    np.testing.assert_allclose(train[:, :2].std(0), 1, rtol=1e-6)
    half = data.scaler_of(values.astype(np.float32))  # sums of float32 lose the mean
    np.testing.assert_allclose(half, data.scaler_of(values), rtol=1e-6)
    far = (values[:, :1] + 30_000).astype(np.float32)  # and took this for a constant
    np.testing.assert_allclose(
        data.scaler_of(far).deviation, values[:, :1].std(0), rtol=1e-3
    )
    assert splits.train.rows.dtype == np.float32 and splits.scaler.deviation[2] == 1
    back = splits.scaler.unscaled(splits.test.rows)
    np.testing.assert_allclose(back, values[780:], rtol=1e-5, atol=1e-5)


def test_constant_but_for_rounding(tmp_path):
    """C2-15."""
    values = np.full((1000, 2), 14.62)
    values[1:700:2, 0] += 2e-15
    values[750:] = 16
    values[:, 1] = 1e6 + 1e-3 * (np.arange(1000) % 2)
    where = data.borders("own", 1000)
    splits = data.splits(values, where, in_len=20, out_len=5)
    assert splits.scaler.deviation[0] == 1
    assert splits.scaler.deviation[1] == pytest.approx(5e-4, rel=1e-4)
    assert np.abs(splits.test.rows[:, 0]).max() <= 1.38001
    hours = np.datetime64("2020-01-01", "h") + np.arange(700)
    path = write(tmp_path, rows(hours, *values[:700].T.tolist()))
    with pytest.raises(ValueError, match="column 'a' is 14.62 in every row"):
        data.read_series(path)
    assert data.read_series(path, constant="drop").names == ("b",)


def test_a_batch_is_the_windows_of_its_numbers():
    values = np.random.default_rng(0).normal(size=(200, 3))
    split = data.splits(values, data.borders("own", 200), in_len=12, out_len=4).test
    index = np.asarray([0, split.size - 1, 5], np.int32)
    batch = data.window_batch(jnp.asarray(split.rows), jnp.asarray(index), 12, 4)
    for row, i in enumerate(index):
        np.testing.assert_array_equal(batch["inputs"][row], split.rows[i : i + 12])
        np.testing.assert_array_equal(batch["targets"][row], split.rows[i + 12 :][:4])
    assert split.size == 40 - 4 + 1 and batch["targets"].dtype == jnp.float32


# Baselines

REFERENCE = [  # ../shared/reference/stanhop_official_numbers.md: MSE and MAE, L 168
    ("etth1", 96, (1.294, 0.713), (0.702, 0.560), (0.512, 0.433), (0.381, 0.395)),
    ("etth1", 192, (1.325, 0.733), (0.716, 0.571), (0.581, 0.469), (0.428, 0.421)),
    ("etth1", 336, (1.330, 0.746), (0.715, 0.579), (0.650, 0.501), (0.458, 0.436)),
    ("etth1", 720, (1.335, 0.755), (0.703, 0.594), (0.655, 0.514), (0.438, 0.447)),
    ("ettm1", 96, (1.214, 0.665), (0.690, 0.545), (0.423, 0.387), (0.319, 0.356)),
    ("wth", 96, (0.870, 0.628), (0.610, 0.571), (0.789, 0.580), (0.507, 0.498)),
]
DIGITS = 5.1e-4  # half of the third


@slow_where(lambda name, out_len: (name, out_len) not in (("etth1", 96), ("wth", 96)))
@pytest.mark.parametrize(
    ("name", "out_len", "last", "mean", "seasonal", "linear"), REFERENCE
)
def test_baselines_equal_the_reference(name, out_len, last, mean, seasonal, linear):
    series, split = split_of(name, 168, out_len)
    models = simple.baselines(split.train, period=series.period)
    if name == "etth1":  # the reference fits some 4,000 windows at most, we fit all
        models["as the reference"] = explicit_fit(
            split.train, 2 if out_len < 720 else 1
        )
    records = simple.evaluate(models, split.test)
    errors = {row["method"]: (row["mse"], row["mae"]) for row in records}
    assert {row["windows"] for row in records} == {split.test.size}
    np.testing.assert_allclose(errors["last value"], last, atol=DIGITS)
    np.testing.assert_allclose(errors["window mean"], mean, atol=DIGITS)
    np.testing.assert_allclose(errors["seasonal"], seasonal, atol=DIGITS)
    if name == "etth1":
        np.testing.assert_allclose(errors["as the reference"], linear, atol=DIGITS)
    assert np.all(np.asarray(errors["linear"]) < np.asarray(linear) + DIGITS)
    np.testing.assert_allclose(errors["linear"], linear, atol=0.01)


def explicit_fit(train, stride=1):
    """The linear map from windows written out."""
    length = train.in_len + train.out_len
    whole = sliding_window_view(train.rows.astype(np.float64), length, axis=0)[::stride]
    whole = whole.reshape(-1, length)
    whole = whole - whole[:, train.in_len - 1, None]
    x, y = whole[:, : train.in_len], whole[:, train.in_len :]
    gram = x.T @ x
    gram += simple.RIDGE * np.diag(gram).mean() * np.eye(train.in_len)
    return simple.Linear(np.linalg.solve(gram, x.T @ y))


def test_the_linear_map_is_fitted_to_all_windows():
    values = np.random.default_rng(0).normal(size=(150, 3)).cumsum(0)
    train = data.splits(values, data.borders("own", 150), in_len=7, out_len=11).train
    fitted, explicit = simple.fit_linear(train), explicit_fit(train)
    np.testing.assert_allclose(fitted.weights, explicit.weights, rtol=1e-8, atol=1e-10)


def test_simple_forecasts_by_hand():
    inputs = np.random.default_rng(0).normal(size=(2, 6, 3))
    last = simple.LastValue(4)(inputs)
    mean = simple.WindowMean(4)(inputs)
    for step in range(4):
        np.testing.assert_array_equal(last[:, step], inputs[:, -1])
        np.testing.assert_allclose(mean[:, step], inputs.mean(1))
    seasonal = simple.Seasonal(7, 3)(inputs)
    np.testing.assert_array_equal(seasonal, inputs[:, [3, 4, 5, 3, 4, 5, 3]])
    with pytest.raises(ValueError, match="period must be at most 6, got 7"):
        simple.Seasonal(7, 7)(inputs)


@pytest.mark.parametrize("block", [1, 2, 100])
def test_the_test_set_is_whole_for_every_block(block):
    rows = np.asarray([0, 1, 2, 3, 4, 9], np.float32)[:, None]
    split = data.Windows(rows, 0, 1, 1)  # UC-34: five windows, errors 1, 1, 1, 1, 5
    (row,) = simple.evaluate({"last": simple.LastValue(1)}, split, block=block)
    assert row == {"method": "last", "windows": 5, "mse": 5.8, "mae": 1.8}
    np.testing.assert_allclose(np.sqrt(row["mse"]), 2.40831892, rtol=1e-8)


def test_a_period_longer_than_the_input_is_left_out():
    rows = np.random.default_rng(0).normal(size=(60, 1)).astype(np.float32)
    train = data.Windows(rows, 0, 12, 3)
    assert list(simple.baselines(train, period=24)) == [
        "last value",
        "window mean",
        "linear",
    ]
