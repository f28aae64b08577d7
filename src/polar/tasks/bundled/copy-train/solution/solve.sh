#!/bin/sh
cp honey.md mushroom.md
