import csv
import sys
from decimal import ROUND_HALF_UP, Decimal, InvalidOperation

NEEDED = ("region", "product", "quantity", "unit_price")


def number(text):
    value = Decimal(text.strip())
    if not value.is_finite():
        raise InvalidOperation
    return value


def main(source, target):
    regions, skipped = {}, 0
    with open(source, newline="", encoding="utf-8-sig") as file:
        rows = csv.DictReader(file)
        for column in NEEDED:
            if column not in (rows.fieldnames or ()):
                print(f"missing column: {column}", file=sys.stderr)
                return 1
        for row in rows:
            try:
                quantity, price = number(row["quantity"] or ""), number(row["unit_price"] or "")
            except InvalidOperation:
                skipped += 1
                continue
            name = (row["region"] or "").strip()
            region = regions.setdefault(name.casefold(), {"name": name, "orders": 0, "quantity": Decimal(0), "products": {}})
            region["orders"] += 1
            region["quantity"] += quantity
            products = region["products"]
            products[row["product"]] = products.get(row["product"], Decimal(0)) + quantity * price
    lines = []
    for region in regions.values():
        revenue = sum(region["products"].values(), Decimal(0))
        best = min(region["products"].items(), key=lambda item: (-item[1], item[0]))[0]
        shown = revenue.quantize(Decimal("0.01"), ROUND_HALF_UP)
        lines.append((-revenue, region["name"], [region["name"], region["orders"], format(region["quantity"], "f"), shown, best]))
    with open(target, "w", newline="", encoding="utf-8") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(["region", "orders", "quantity", "revenue", "best_product"])
        out.writerows(line[2] for line in sorted(lines, key=lambda line: line[:2]))
    print(f"skipped {skipped}")
    return 0


sys.exit(main(*sys.argv[1:3]))
