import calendar
from datetime import date, timedelta


def add_months(day, months):
    year, month = divmod(day.year * 12 + day.month - 1 + months, 12)
    return date(year, month + 1, min(day.day, calendar.monthrange(year, month + 1)[1]))


def _weekdays_before(day):
    weeks, rest = divmod(day.toordinal() - 1, 7)  # 0001-01-01 was a Monday
    return weeks * 5 + min(rest, 5)


def business_days(start, end, holidays=()):
    if end < start:
        return -business_days(end, start, holidays)
    off = {day for day in holidays if start <= day < end and day.weekday() < 5}
    return _weekdays_before(end) - _weekdays_before(start) - len(off)


def add_business_days(day, count, holidays=()):
    off = set(holidays)
    step = timedelta(days=-1 if count < 0 else 1)
    if count == 0:
        while day.weekday() >= 5 or day in off:
            day += step
        return day
    left = abs(count)
    while left:
        day += step
        if day.weekday() < 5 and day not in off:
            left -= 1
    return day


def quarter(day):
    return f"{day.year}-Q{(day.month + 2) // 3}"


def week_label(day):
    year, week, _ = day.isocalendar()
    return f"{year}-W{week:02}"
