import unittest

from spans import SpanError, format_span, parse_span


class TestParse(unittest.TestCase):
    def test_parts_add_up(self):
        self.assertEqual(parse_span("1h30m"), 5400)
        self.assertEqual(parse_span("1w2d"), 777600)

    def test_fractions_and_milliseconds(self):
        self.assertEqual(parse_span("1.5d"), 129600)
        self.assertAlmostEqual(parse_span("2s250ms"), 2.25)

    def test_sign(self):
        self.assertEqual(parse_span("-90s"), -90)
        self.assertEqual(parse_span("+1m"), 60)

    def test_case_and_outer_space(self):
        self.assertEqual(parse_span(" 2H "), 7200)

    def test_units_go_down_each_once(self):
        for text in ("30m1h", "1h1h", "5ms1s"):
            with self.subTest(text=text), self.assertRaises(SpanError):
                parse_span(text)

    def test_refused(self):
        for text in ("", "-", "10", "h", "1x", "1h 30m", "--1s"):
            with self.subTest(text=text), self.assertRaises(SpanError):
                parse_span(text)


class TestFormat(unittest.TestCase):
    def test_shortest(self):
        self.assertEqual(format_span(5400), "1h30m")
        self.assertEqual(format_span(604800), "1w")
        self.assertEqual(format_span(0), "0s")

    def test_milliseconds(self):
        self.assertEqual(format_span(2.25), "2s250ms")

    def test_parts_of_an_exact_duration(self):
        self.assertEqual(format_span(90000, parts=2), "1d1h")

    def test_negative(self):
        self.assertEqual(format_span(-90), "-1m30s")
        self.assertEqual(format_span(-0.25), "-250ms")

    def test_there_and_back(self):
        for seconds in (-3661, -1, 59, 86399, 100000.5):
            with self.subTest(seconds=seconds):
                self.assertAlmostEqual(parse_span(format_span(seconds)), seconds)

    def test_milliseconds_carry(self):
        self.assertEqual(format_span(59.9996), "1m")
        self.assertEqual(format_span(3599.9999), "1h")
        self.assertEqual(format_span(0.0001), "0s")
        self.assertEqual(format_span(-0.0001), "0s")

    def test_parts_are_rounded(self):
        self.assertEqual(format_span(5399, parts=1), "1h")
        self.assertEqual(format_span(5400, parts=1), "2h")
        self.assertEqual(format_span(86399, parts=2), "1d")
        self.assertEqual(format_span(-5430, parts=2), "-1h31m")

    def test_more_parts_than_there_are(self):
        self.assertEqual(format_span(1.5, parts=4), "1s500ms")
