import unittest

from plate import Template, TemplateError, render


class TestValues(unittest.TestCase):
    def test_text_and_value(self):
        self.assertEqual(render("Dear {{ name }}!", name="Ada"), "Dear Ada!")

    def test_path(self):
        self.assertEqual(render("{{ a.b.c }}", a={"b": {"c": 3}}), "3")

    def test_filters(self):
        self.assertEqual(render("{{ name|upper }}{{ items|join }}", name="x", items=["a", "b"]), "Xa, b")

    def test_unknown_name(self):
        with self.assertRaises(TemplateError):
            render("{{ nobody }}")


class TestBlocks(unittest.TestCase):
    def test_if_else(self):
        template = Template("{% if x %}yes{% else %}no{% endif %}")
        self.assertEqual(template.render(x=1) + template.render(x=0), "yesno")

    def test_for(self):
        self.assertEqual(render("{% for x in xs %}{{ x }};{% endfor %}", xs=[1, 2]), "1;2;")

    def test_loop(self):
        text = "{% for x in xs %}{{ loop.index }}{{ x }}{% if loop.last %}.{% else %}, {% endif %}{% endfor %}"
        self.assertEqual(render(text, xs="ab"), "1a, 2b.")

    def test_not_closed(self):
        with self.assertRaises(TemplateError):
            Template("{% for x in xs %}")

    def test_not_understood(self):
        with self.assertRaises(TemplateError):
            Template("{% while x %}")

    def test_an_inner_loop_leaves_the_outer_one(self):
        text = "{% for row in rows %}{{ loop.index }}:{% for x in row %}{{ x }}{% endfor %}:{{ loop.index }}{% if loop.last %}!{% endif %} {% endfor %}"
        self.assertEqual(render(text, rows=["ab", "c"]), "1:ab:1 2:c:2! ")

    def test_a_loop_variable_ends_with_its_loop(self):
        self.assertEqual(render("{% for x in xs %}{{ x }}{% endfor %}{{ x }}", xs="ab", x="z"), "abz")
        with self.assertRaises(TemplateError):
            render("{% for x in xs %}{{ x }}{% endfor %}{{ x }}", xs="ab")
        with self.assertRaises(TemplateError):
            render("{% for x in xs %}{% endfor %}{{ loop.index }}", xs="ab")

    def test_parent_loop(self):
        text = "{% for row in rows %}{% for x in row %}{{ loop.parent.index }}{{ loop.index }} {% endfor %}{% endfor %}"
        self.assertEqual(render(text, rows=["ab", "c"]), "11 12 21 ")


class Point:
    x = 4
    _hidden = 5


class TestLookups(unittest.TestCase):
    def test_attributes(self):
        self.assertEqual(render("{{ p.x }}", p=Point()), "4")

    def test_hidden_attributes_are_unknown(self):
        with self.assertRaises(TemplateError):
            render("{{ p._hidden }}", p=Point())

    def test_positions_of_lists(self):
        self.assertEqual(render("{{ xs.1 }}", xs=["a", "b"]), "b")
        with self.assertRaises(TemplateError):
            render("{{ xs.2 }}", xs=["a", "b"])

    def test_methods_of_dictionaries_are_no_values(self):
        with self.assertRaises(TemplateError):
            render("{{ d.keys }}", d={})

    def test_unknown_filter(self):
        with self.assertRaises(TemplateError):
            render("{{ x|nothing }}", x=1)
