#!/bin/sh
sed -i s/wave/oasis/ sand.md
