#!/bin/sh
cp raven.log horizon.txt
